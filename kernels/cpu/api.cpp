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
constexpr int64_t ISAS = 4;

bool supported(int64_t isa) {
#ifdef BITKV_X86
    if (isa > 0 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))) return false;
    if (isa == 3)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    if (isa == 2) return has_avxvnni();
    return isa <= 1;
#else
    return isa == 0;
#endif
}

const Kernels& kernels_of(int64_t isa) {
#ifdef BITKV_X86
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

const Kernels& kernels() {
    const Kernels* found = chosen;
    return found ? *found : best();
}

}  // namespace

extern "C" {

// Chooses an instruction set: 0 portable, 1 avx2, 2 avxvnni, 3 avx512, -1 the best. Returns its name, or null if this machine lacks it.
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
// Returns the refined tokens, counted once per KV head and query.
int64_t bitkv_attend(const Layout* l, const Queries* q, const Refinement* refine, const uint8_t* records, int64_t granules,
                     const uint8_t* page_valid, float* m, float* l_out, float* o, int64_t threads) {
    const Kernels& run = kernels();
    const int64_t page_stride = l->kv_heads * l->record_bytes, rows = q->count * q->group;
    std::atomic<int64_t> refined{0};
    const int64_t granule_stride = l->pages * page_stride, tasks = granules * l->kv_heads;
    auto records_of = [&](int64_t task) { return records + task / l->kv_heads * granule_stride + task % l->kv_heads * l->record_bytes; };
    // A thread takes all heads of a granule at once where there are enough granules: what follows is then its own, and can be fetched ahead.
    const int64_t share = granules >= 4 * threads ? l->kv_heads : 1;
    Pool::instance().run(tasks / share, threads, [&](int64_t part) {
        const int64_t task = part * share, next = task + share;
        const Granule view = {records_of(task), next < tasks ? records_of(next) : nullptr, page_stride, page_valid + task / l->kv_heads * l->pages};
        refined += run.attend(*l, *q, task % l->kv_heads, share, view, *refine, {m + task * rows, l_out + task * rows, o + task * rows * l->dim});
    });
    return refined;
}

// The merge tree of bitkv_dist/partial.py. Partials of granules [n, rows(, D)] with ascending global indices go to lanes index % width;
// the lanes are merged down to `nodes`. m, l, o [width, rows(, D)] are work space; their first `nodes` entries are the result.
void bitkv_tree(int64_t granules, const int64_t* index, int64_t rows, int64_t dim, const float* m_in, const float* l_in, const float* o_in,
                int64_t width, int64_t nodes, float* m, float* l, float* o, int64_t threads) {
    const Kernels& run = kernels();
    std::fill_n(m, width * rows, -INFINITY);
    const int64_t parts = std::max<int64_t>(1, std::min(threads, rows));
    Pool::instance().run(parts, threads, [&](int64_t part) {
        const int64_t first = part * rows / parts, count = (part + 1) * rows / parts - first;
        auto merge = [&](int64_t lane, const float* m2, const float* l2, const float* o2, int64_t other) {
            const int64_t to = lane * rows + first, from = other * rows + first;
            run.merge(count, dim, m + to, l + to, o + to * dim, m2 + from, l2 + from, o2 + from * dim);
        };
        for (int64_t g = 0; g < granules; ++g) merge(index[g] % width, m_in, l_in, o_in, g);
        for (int64_t stride = width / 2; stride >= nodes; stride /= 2)
            for (int64_t lane = 0; lane < stride; ++lane) merge(lane, m, l, o, lane + stride);
        for (int64_t lane = 0; lane < nodes; ++lane)  // what nothing was merged into
            for (int64_t row = lane * rows + first; row < lane * rows + first + count; ++row)
                if (m[row] == -INFINITY) l[row] = 0.0f, std::memset(o + row * dim, 0, dim * sizeof(float));
    });
}

// Partials m, l [HK, G], o [HK, G, D] of decode queries q fp32 [HK, G, D] over exact rows k, v fp32 [HK, count, D], head_stride floats
// between heads.
void bitkv_attend_exact(int64_t kv_heads, int64_t group, int64_t dim, const float* q, const float* k, const float* v, int64_t count,
                        int64_t head_stride, float* m, float* l, float* o, int64_t threads) {
    const Kernels& run = kernels();
    Pool::instance().run(kv_heads, threads, [&](int64_t head) {
        for (int64_t row = head * group; row < (head + 1) * group; ++row)
            run.attend_exact(dim, count, dim, q + row * dim, k + head * head_stride, v + head * head_stride, m + row, l + row, o + row * dim);
    });
}

// Rotates z fp32 [HK, rows, D] back in place; signs [HK, D].
void bitkv_rotate_back(int64_t kv_heads, int64_t rows, int64_t dim, float* z, const float* signs) {
    for (int64_t i = 0; i < kv_heads * rows; ++i) kernels().rotate_back(dim, z + i * dim, signs + i / rows * dim);
}

// Two inner pieces, for tests; see interface.hpp.
void bitkv_level_dot(const uint8_t* words, int64_t planes, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, int32_t* out, int64_t out_stride) {
    kernels().level_dot(words, planes, height, width, operands, stride, rows, out, out_stride);
}

void bitkv_select(int64_t rows, int64_t total, const float* scores, int64_t group, int64_t count, int32_t* positions) {
    kernels().select(rows, total, scores, group != 0, count, positions);
}

}  // extern "C"
