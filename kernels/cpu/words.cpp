// The C interface of attention to words, which kernels/cpu/words.py calls through ctypes.
#include <algorithm>
#include <atomic>
#include <vector>

#include "interface.hpp"
#include "pool.hpp"
#include "seen.hpp"

using namespace bitkv;

extern "C" {

// Granules records [n, pages, HK, record_bytes], page_valid [n, pages], decode queries q fp32 [HK, G, D] in base 2 -> m, l [n, HK, G],
// o [n, HK, G, D]. page_mass [n, HK, G, pages] may be null. Returns the refined tokens, counted once per KV head.
int64_t bitkv_attend_words(const Words* w, const Refinement* refine, int64_t group, const float* q, const uint8_t* records, int64_t granules,
                           const uint8_t* page_valid, float* m, float* l, float* o, float* page_mass, int64_t threads) {
    const int64_t page_stride = w->kv_heads * w->record_bytes, some = std::clamp<int64_t>(granules * w->kv_heads / (4 * threads), 1, 8);
    const int64_t parts = (granules + some - 1) / some;
    std::atomic<int64_t> refined{0};
    Pool::instance().run(parts * w->kv_heads, threads, [&](int64_t task) {
        const int64_t head = task / parts, first = task % parts * some;  // a head's tables are read together
        for (int64_t g = first; g < std::min(granules, first + some); ++g) {
            const Granule granule = {records + g * w->pages * page_stride, page_valid + g * w->pages};
            const int64_t at = (g * w->kv_heads + head) * group;
            const PartialOut to = {m + at, l + at, o + at * w->dim, page_mass ? page_mass + at * w->pages : nullptr};
            refined += kernels().attend_words(*w, group, q + head * group * w->dim, head, &granule, 1, page_stride, *refine, to);
        }
    });
    return refined;
}

// q fp32 [HK, G, D] in base 2 -> partials m, l [HK, G], o [HK, G, D] of the exact rows, and those of the first `nodes` of `width` tree nodes
// over the sealed granules. Returns the refined tokens, counted once per KV head.
int64_t bitkv_see_words(const Words* w, const Refinement* refine, const Seen* seen, int64_t group, const float* q, float* exact_m,
                        float* exact_l, float* exact_o, float* node_m, float* node_l, float* node_o, int64_t threads) {
    const int64_t heads = w->kv_heads, dim = w->dim, page_stride = heads * w->record_bytes;
    attend_exact_rows(*seen, heads, group, dim, q, exact_m, exact_l, exact_o, threads);
    const Nodes nodes = {heads, group, dim, w->pages, w->record_bytes, true, {node_m, node_l, node_o}};
    return nodes.fill(*seen, threads, [&](int64_t head, int64_t, const std::vector<Granule>& own, const PartialOut& to) {
        return kernels().attend_words(*w, group, q + head * group * dim, head, own.data(), int64_t(own.size()), page_stride, *refine, to);
    });
}

}  // extern "C"
