// What one decode query of a sequence sees in one layer, and the merge tree of bitkv_dist/partial.py over its sealed granules.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "interface.hpp"
#include "pool.hpp"
#include "room.hpp"

namespace bitkv {

// Exact rows k, v [HK, rows, D], fp32 or bfloat16, head_stride numbers between heads, with the query's own at the end; sealed granules in slabs of records
// [n, pages, HK, record_bytes], of all of them page_valid [granules, pages] and the ascending global indices.
struct Seen {
    int64_t rows, head_stride, bfloat16, slabs, granules, width, nodes;
    const void *k, *v;
    const uint8_t* const* records;
    const int64_t *slab_granules, *index;
    const uint8_t* page_valid;
};

// Partials m, l [HK, G], o [HK, G, D] of a decode query q fp32 [HK, G, D] over the exact rows.
inline void attend_exact_rows(const Seen& seen, int64_t heads, int64_t group, int64_t dim, const float* q, float* m, float* l, float* o, int64_t threads) {
    const Kernels& run = kernels();
    const int64_t numbers = seen.rows * dim;
    Pool::instance().run(heads, threads, [&](int64_t head) {
        thread_local Room<float> wide[2];
        const float* side[2] = {};
        for (int i = 0; i < 2; ++i) {
            const void* from = i ? seen.v : seen.k;
            if (seen.bfloat16) run.widen(numbers, static_cast<const uint16_t*>(from) + head * seen.head_stride, room(wide[i], numbers)), side[i] = wide[i].data();
            else side[i] = static_cast<const float*>(from) + head * seen.head_stride;
        }
        for (int64_t row = head * group; row < (head + 1) * group; ++row) run.attend_exact(dim, seen.rows, dim, q + row * dim, side[0], side[1], m + row, l + row, o + row * dim);
    });
}

// Rows first .. first + count - 1 of partials [lanes, rows(, D)] that others are merged into.
struct Tree {
    int64_t rows, first, count, dim;
    PartialOut lanes;

    void clear(int64_t width) const {
        for (int64_t lane = 0; lane < width; ++lane) std::fill_n(lanes.m + lane * rows + first, count, -INFINITY);
    }

    void merge(int64_t lane, const PartialOut& from, int64_t other) const {
        const int64_t to = lane * rows + first, at = other * rows + first;
        kernels().merge(count, dim, lanes.m + to, lanes.l + to, lanes.o + to * dim, from.m + at, from.l + at, from.o + at * dim);
    }

    // What is at `other` becomes part of what is at `lane`, or takes its place if there is nothing, -1.
    void join(int64_t& lane, int64_t other) const {
        if (lane < 0) lane = other;
        else merge(lane, lanes, other);
    }

    // From `width` lanes to `nodes`; what nothing was merged into becomes the empty partial.
    void reduce(int64_t width, int64_t nodes) const {
        for (int64_t stride = width / 2; stride >= nodes; stride /= 2)
            for (int64_t lane = 0; lane < stride; ++lane) merge(lane, lanes, lane + stride);
        for (int64_t lane = 0; lane < nodes; ++lane)
            for (int64_t row = lane * rows + first; row < lane * rows + first + count; ++row)
                if (lanes.m[row] == -INFINITY) lanes.l[row] = 0.0f, std::memset(lanes.o + row * dim, 0, dim * sizeof(float));
    }
};

constexpr int64_t PARTIAL_BYTES = 1 << 18;  // of a task's granules

// The first nodes of the tree, m, l [nodes, HK, G], o [nodes, HK, G, D]. by_head: a task is of one head, and all tasks of a head come together,
// for kernels that read tables of a head's own.
struct Nodes {
    int64_t heads, group, dim, pages, record_bytes;
    bool by_head;
    PartialOut to;

    // attend(head, heads, granules, partials [granules][heads, G]) -> tokens refined, of which it returns all.
    template <class Attend>
    int64_t fill(const Seen& seen, int64_t threads, const Attend& attend) const {
        const int64_t rows = heads * group;
        // A task is a node of the tree, of so many granules that their partials never leave the cache, and no fewer: for what it reads first it waits.
        const int64_t most = std::max<int64_t>(8, PARTIAL_BYTES / ((by_head ? group : rows) * dim * int64_t(sizeof(float))));
        int64_t nodes = seen.nodes;
        while (nodes < seen.width && (nodes < 4 * threads || nodes * most < seen.granules)) nodes *= 2;
        const int64_t some = by_head || nodes < 4 * threads ? 1 : heads, parts = heads / some;
        std::atomic<int64_t> refined{0};
        Pool::instance().run(nodes * parts, threads, [&](int64_t task) {
            thread_local std::vector<Granule> own;
            thread_local std::vector<int64_t> leaf, lane;  // where granules go; of a lane the granule whose partial is its so far, or -1
            thread_local Room<float> work;
            const int64_t node = by_head ? task % nodes : task / parts, head = by_head ? task / nodes : task % parts;
            const int64_t here = some * group, lanes = seen.width / nodes;
            own.clear(), leaf.clear(), lane.assign(lanes, -1);
            const int64_t *index = seen.index, granule_bytes = pages * heads * record_bytes;
            const uint8_t* valid = seen.page_valid;
            for (int64_t slab = 0; slab < seen.slabs; ++slab)
                for (int64_t g = 0; g < seen.slab_granules[slab]; ++g, ++index, valid += pages)
                    if ((*index & (nodes - 1)) == node) own.push_back({seen.records[slab] + g * granule_bytes, valid}), leaf.push_back(*index / nodes & (lanes - 1));
            const int64_t count = int64_t(own.size());
            float* o = room(work, count * here * (dim + 2));
            const Tree tree = {here, 0, here, dim, {o + count * here * dim, o + count * here * (dim + 1), o}};
            refined += attend(head, some, own, tree.lanes);
            for (int64_t g = 0; g < count; ++g) tree.join(lane[leaf[g]], g);
            for (int64_t stride = lanes / 2; stride >= 1; stride /= 2)
                for (int64_t i = 0; i < stride; ++i)
                    if (lane[i + stride] >= 0) tree.join(lane[i], lane[i + stride]);
            const int64_t at = node * rows + head * here, from = lane[0] * here;
            if (from >= 0) std::copy_n(tree.lanes.m + from, here, to.m + at), std::copy_n(tree.lanes.l + from, here, to.l + at), std::copy_n(o + from * dim, here * dim, to.o + at * dim);
            else std::fill_n(to.m + at, here, -INFINITY), std::fill_n(to.l + at, here, 0.0f), std::fill_n(to.o + at * dim, here * dim, 0.0f);
        });
        Tree{rows, 0, rows, dim, to}.reduce(nodes, seen.nodes);
        return refined;
    }
};

}  // namespace bitkv
