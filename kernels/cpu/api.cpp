// The C interface that kernels/cpu/__init__.py calls through ctypes: pointers and sizes only.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>
#ifdef BITKV_X86
#include <cpuid.h>
#endif

#include "interface.hpp"
#include "pool.hpp"
#include "room.hpp"
#include "seen.hpp"

using namespace bitkv;

namespace {

std::atomic<const Kernels*> chosen{nullptr};

#ifdef BITKV_X86
// Bit 4 of EAX of leaf 7, subleaf 1; older compilers have no name for it.
bool has_avxvnni() {
    unsigned a = 0, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

// Instruction sets by number; the best that a machine has is the last.
constexpr int64_t ISAS = 5;

bool supported(int64_t isa) {
#ifdef BITKV_X86
    if (isa > 0 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma"))) return false;
    if (isa == 4 && !__builtin_cpu_supports("avx512bf16")) return false;
    if (isa >= 3)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
    if (isa == 2) return has_avxvnni();
    return isa <= 1;
#else
    return isa == 0;
#endif
}

const Kernels& kernels_of(int64_t isa) {
#ifdef BITKV_X86
    if (isa == 4) return avx512bf16_kernels();
    if (isa == 3) return avx512_kernels();
    if (isa == 2) return avxvnni_kernels();
    if (isa == 1) return avx2_kernels();
#endif
    return portable_kernels();
}

const Kernels& best() {
    int64_t isa = ISAS - 1;
    while (!supported(isa)) --isa;
    return kernels_of(isa);
}

template <class Run, class Number>
int64_t attend_prompt_by(Run run, int64_t kv_heads, int64_t group, int64_t n, int64_t dim, int64_t total, float scale, const Number* q,
                         const Number* k, const Number* v, int64_t head_stride, Number* out, int64_t threads) {
    if (!run) return 0;
    // Rows of a task: enough that turning a block of keys costs little, few enough to stay in the cache and to share them out.
    const int64_t rows = group * n, some = std::clamp<int64_t>(kv_heads * rows / (4 * threads), 96, 768), tasks = (rows + some - 1) / some;
    Pool::instance().run(kv_heads * tasks, threads, [&](int64_t task) {
        const int64_t head = task / tasks, first = task % tasks * some, offset = head * rows * dim;
        run(dim, n, total, scale, q + offset, k + head * head_stride, v + head * head_stride, first, std::min(rows, first + some), out + offset);
    });
    return 1;
}

}  // namespace

const Kernels& bitkv::kernels() {
    const Kernels* found = chosen;
    return found ? *found : best();
}

extern "C" {

int64_t bitkv_interface() { return INTERFACE; }

// Chooses an instruction set: 0 portable, 1 avx2, 2 avxvnni, 3 avx512, 4 avx512bf16, -1 the best. Returns its name, or null if this machine lacks it.
const char* bitkv_choose(int64_t isa) {
    if (isa >= 0 && !supported(isa)) return nullptr;
    const Kernels& found = isa >= 0 ? kernels_of(isa) : best();
    chosen = &found;
    return found.name;
}

// Whether this machine has an instruction set.
int64_t bitkv_supports(int64_t isa) { return supported(isa); }

// k and v fp32 [pages, HK, P, D] contiguous, signs [2][HK, D] -> records [pages, HK, record_bytes].
void bitkv_encode(const Layout* l, int64_t pages, const float* k, const float* v, const float* key_signs, const float* value_signs,
                  int64_t unbiased, uint8_t* records, int64_t threads) {
    const Kernels& run = kernels();
    const int64_t page_size = l->tokens * l->dim;
    Pool::instance().run(pages * l->kv_heads * 2, threads, [&](int64_t task) {
        const int64_t item = task / 2, head = item % l->kv_heads;
        const Side side = task % 2 ? VALUES : KEYS;
        const float* signs = (side == KEYS ? key_signs : value_signs) + head * l->dim;
        run.encode(*l, side, (side == KEYS ? k : v) + item * page_size, signs, side == KEYS && unbiased, records + item * l->record_bytes);
    });
}

// q fp32 [HK, rows, D] -> codes int8 and rotated fp32 [HK, rows, D], scale and norm2 fp32 [HK, rows].
void bitkv_quantize_query(int64_t kv_heads, int64_t rows, int64_t dim, const float* q, const float* signs, int8_t* codes, float* scale,
                          float* norm2, float* rotated) {
    for (int64_t i = 0; i < kv_heads * rows; ++i)
        kernels().quantize_query(dim, q + i * dim, signs + i / rows * dim, codes + i * dim, scale + i, norm2 + i, rotated + i * dim);
}

// Granules records [n, pages, HK, record_bytes], page_valid [n, pages] -> m, l [n, HK, Q, G], o [n, HK, Q, G, D].
// page_mass [n, HK, Q, G, pages] may be null. Returns the refined tokens, counted once per KV head and query.
int64_t bitkv_attend(const Layout* l, const Queries* q, const Refinement* refine, const uint8_t* records, int64_t granules,
                     const uint8_t* page_valid, float* m, float* l_out, float* o, float* page_mass, int64_t threads) {
    const Kernels& run = kernels();
    const int64_t page_stride = l->kv_heads * l->record_bytes, rows = q->count * q->group;
    std::vector<Granule> views(granules);
    for (int64_t g = 0; g < granules; ++g) views[g] = {records + g * l->pages * page_stride, page_valid + g * l->pages};
    std::atomic<int64_t> refined{0};
    // A thread takes some granules and all their heads where there are enough: what follows is then its own, and can be fetched ahead.
    const bool whole = granules >= 4 * threads;
    const int64_t heads = whole ? l->kv_heads : 1, some = whole ? std::clamp<int64_t>(granules / (4 * threads), 1, 8) : 1;
    const int64_t parts = l->kv_heads / heads;
    Pool::instance().run((granules + some - 1) / some * parts, threads, [&](int64_t task) {
        const int64_t first = task / parts * some, head = task % parts, at = (first * l->kv_heads + head) * rows;
        refined += run.attend(*l, *q, head, heads, &views[first], std::min(some, granules - first), page_stride, *refine,
                              {m + at, l_out + at, o + at * l->dim, page_mass ? page_mass + at * l->pages : nullptr});
    });
    return refined;
}

// The merge tree of bitkv_dist/partial.py. Partials of granules [n, rows(, D)] with ascending global indices go to lanes index % width;
// the lanes are merged down to `nodes`. m, l, o [width, rows(, D)] are work space; their first `nodes` entries are the result.
void bitkv_tree(int64_t granules, const int64_t* index, int64_t rows, int64_t dim, const float* m_in, const float* l_in, const float* o_in,
                int64_t width, int64_t nodes, float* m, float* l, float* o, int64_t threads) {
    const int64_t parts = std::max<int64_t>(1, std::min(threads, rows));
    Pool::instance().run(parts, threads, [&](int64_t part) {
        const int64_t first = part * rows / parts, count = (part + 1) * rows / parts - first;
        const Tree tree = {rows, first, count, dim, {m, l, o}};
        tree.clear(width);
        for (int64_t g = 0; g < granules; ++g) tree.merge(index[g] % width, {const_cast<float*>(m_in), const_cast<float*>(l_in), const_cast<float*>(o_in)}, g);
        tree.reduce(width, nodes);
    });
}

// Partials m, l [HK, G], o [HK, G, D] of decode queries q fp32 [HK, G, D] over exact rows k, v fp32 [HK, count, D], head_stride floats
// between heads.
void bitkv_attend_exact(int64_t kv_heads, int64_t group, int64_t dim, const float* q, const float* k, const float* v, int64_t count,
                        int64_t head_stride, float* m, float* l, float* o, int64_t threads) {
    Seen seen = {};
    seen.rows = count, seen.head_stride = head_stride, seen.k = k, seen.v = v;
    attend_exact_rows(seen, kv_heads, group, dim, q, m, l, o, threads);
}

// Rotates z fp32 [HK, rows, D] back in place; signs [HK, D].
void bitkv_rotate_back(int64_t kv_heads, int64_t rows, int64_t dim, float* z, const float* signs) {
    for (int64_t i = 0; i < kv_heads * rows; ++i) kernels().rotate_back(dim, z + i * dim, signs + i / rows * dim);
}

// q fp32 [HK, G, D] in base 2, signs [HK, D] -> partials m, l [HK, G], o [HK, G, D] of the exact rows, and those of the first `nodes` of
// `width` tree nodes over the sealed granules, in rotated space. Returns the refined tokens, counted once per KV head.
int64_t bitkv_see(const Layout* layout, const Refinement* refine, const Seen* seen, int64_t group, const float* q, const float* signs,
                  float* exact_m, float* exact_l, float* exact_o, float* node_m, float* node_l, float* node_o, int64_t threads) {
    const int64_t heads = layout->kv_heads, dim = layout->dim, rows = heads * group, page_stride = heads * layout->record_bytes;
    attend_exact_rows(*seen, heads, group, dim, q, exact_m, exact_l, exact_o, threads);
    Room<int8_t> codes(rows * dim);
    Room<float> scale(rows), norm2(rows), rotated(rows * dim);
    bitkv_quantize_query(heads, group, dim, q, signs, codes.data(), scale.data(), norm2.data(), rotated.data());
    const Queries queries = {1, group, codes.data(), scale.data(), norm2.data(), rotated.data()};
    const Nodes nodes = {heads, group, dim, layout->pages, layout->record_bytes, false, {node_m, node_l, node_o}};
    return nodes.fill(*seen, threads, [&](int64_t head, int64_t some, const std::vector<Granule>& own, const PartialOut& to) {
        return kernels().attend(*layout, queries, head, some, own.data(), int64_t(own.size()), page_stride, *refine, to);
    });
}

// The attention output [HK, G, D] from the root of the tree, turned back out of rotated space unless signs is null, and the exact rows'
// partial. Returns whether all of it is finite.
int64_t bitkv_finish(int64_t kv_heads, int64_t group, int64_t dim, const float* signs, const float* root_m, const float* root_l, const float* root_o,
                     const float* exact_m, const float* exact_l, const float* exact_o, float* out) {
    const int64_t rows = kv_heads * group;
    std::vector<float> m(root_m, root_m + rows), l(root_l, root_l + rows);
    std::memcpy(out, root_o, rows * dim * sizeof(float));
    if (signs) bitkv_rotate_back(kv_heads, group, dim, out, signs);
    kernels().merge(rows, dim, m.data(), l.data(), out, exact_m, exact_l, exact_o);
    float worst = 0.0f;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < dim; ++d) {
            out[r * dim + d] /= l[r] == 0.0f ? 1.0f : l[r];
            worst += out[r * dim + d] * 0.0f;  // NaN from NaN and from infinities
        }
    return worst == 0.0f;
}

// Causal attention of prompt queries q [HK, G, n, D], the last n of `total` positions, over k and v [total, D] of each KV head, which are
// head_stride numbers apart; out like q; all float32 or all bfloat16. Returns 0, having done nothing, where the instruction set has no such
// kernel.
int64_t bitkv_attend_prompt(int64_t kv_heads, int64_t group, int64_t n, int64_t dim, int64_t total, float scale, const float* q, const float* k,
                            const float* v, int64_t head_stride, float* out, int64_t threads) {
    return attend_prompt_by(kernels().attend_prompt, kv_heads, group, n, dim, total, scale, q, k, v, head_stride, out, threads);
}

int64_t bitkv_attend_prompt_bfloat16(int64_t kv_heads, int64_t group, int64_t n, int64_t dim, int64_t total, float scale, const uint16_t* q,
                                     const uint16_t* k, const uint16_t* v, int64_t head_stride, uint16_t* out, int64_t threads) {
    if (dim % 2 || !(scale > 0)) return 0;
    return attend_prompt_by(kernels().attend_prompt_bfloat16, kv_heads, group, n, dim, total, scale, q, k, v, head_stride, out, threads);
}

// Two inner pieces, for tests; see interface.hpp.
void bitkv_level_dot(const uint8_t* words, int64_t planes, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, int32_t* out, int64_t out_stride) {
    kernels().level_dot(words, planes, height, width, operands, stride, rows, out, out_stride);
}

void bitkv_select(int64_t rows, int64_t total, const float* scores, int64_t group, int64_t count, int32_t* positions) {
    kernels().select(rows, total, scores, group != 0, count, positions);
}

}  // extern "C"
