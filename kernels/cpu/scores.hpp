// The first half of a unit: scores of the scanned keys, and which tokens are to be refined.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ahead.hpp"
#include "level_dot.hpp"
#include "select.hpp"
#include "unit.hpp"

namespace {

inline void score(const Layout& l, const Queries& q, float noise_factor, Unit& u, int32_t* levels, Workspace& s, Ahead& ahead) {
    const int64_t P = l.tokens, D = l.dim, pages = u.pages();
    s.words.clear();
    for (const uint8_t* record : u.record) s.words.push_back(record + l.planes[KEYS]);
    level_dot(s.words.data(), pages, l.scan_bits[KEYS], D / 4, P / 8, q.codes + u.first * D, D, u.rows, levels, u.total, ahead);
    u.load(l, KEYS);
    float *scores = room(u.scores, u.rows * u.total), *base = room(u.base, u.rows * pages), *product = room(s.product, D);
    float *sizes = room(s.sizes, 2 * P), *squares = sizes + P;
    const float unit = level_unit(l.scan_bits[KEYS]);
    for (int64_t page = 0; page < pages; ++page) {
        const float *centroid = &u.centroid[KEYS][page * D], *a = &u.scale[KEYS][page * P];
        for (int64_t t = 0; t < P; t += 16) {
            const Sixteen size = load16(a + t);
            store16(sizes + t, size * unit), store16(squares + t, size * size);
        }
        for (int64_t r = 0; r < u.rows; ++r) {
            ahead.step(12);
            const float scale = q.scale[u.first + r], noise = q.norm2[u.first + r] * noise_factor;
            const float c = base[r * pages + page] = fold_product(q.rotated + (u.first + r) * D, centroid, D, product);
            const int32_t* level = levels + r * u.total + page * P;
            float* to = scores + r * u.total + page * P;
            for (int64_t t = 0; t < P; t += 16) {
                const Sixteen coded = __builtin_convertvector(load16(level + t), Sixteen) * scale * load16(sizes + t);
                store16(to + t, (coded + noise * load16(squares + t)) + c);
            }
        }
    }
}

// Chooses the tokens, keeps the levels of their scanned keys, and sends for what the scan did not read.
inline void choose(const Layout& l, const Refinement& refine, Unit& u, const int32_t* levels, Workspace& s, Ahead& ahead) {
    const int64_t share = int64_t(std::ceil(double(u.total) * refine.share)), count = std::min(u.total, std::max(refine.min_tokens, share));
    const int64_t lists = refine.group ? 1 : u.rows;
    int32_t* tokens = room(u.selected, lists * count);
    u.shifted = select(u.rows, u.total, u.scores.data(), refine.group != 0, count, tokens, room(u.peak, u.rows), room(u.p, u.rows * u.total), s);
    int32_t* kept = room(u.levels, u.rows * count);
    for (int64_t i = 0; i < lists; ++i) {
        const List list = {i, u.rows / lists, count, tokens + i * count};
        u.lists.push_back(list);
        for (int64_t r = list.row; r < list.row + list.rows; ++r)
            for (int64_t j = 0; j < count; ++j) kept[r * count + j] = levels[r * u.total + list.tokens[j]];
        for (int64_t j = 0; j < count; ++j)
            for (Side side : {KEYS, VALUES}) {
                const int64_t low = l.bits[side] - l.scan_bits[side];
                if (low) ahead.add(u.low_bits(l, side, list.tokens[j]), low * l.dim / 8), ahead.add(u.full_scale(l, side, list.tokens[j]), 1);
            }
    }
}

inline void begin(const Layout& l, const Queries& q, const Refinement& refine, const Granule& granule, int64_t first, Unit& u, Workspace& s, Ahead& ahead) {
    u.record.clear(), u.lists.clear();
    for (int64_t page = 0; page < l.pages; ++page)
        if (granule.page_valid[page]) u.record.push_back(granule.records + page * granule.page_stride);
    u.first = first, u.rows = q.group, u.total = u.pages() * l.tokens, u.shifted = false;
    if (u.total == 0) return;
    score(l, q, refine.scan_noise, u, room(s.levels, u.rows * u.total), s, ahead);
    if (refine.enabled) choose(l, refine, u, s.levels.data(), s, ahead);
}

}  // namespace
