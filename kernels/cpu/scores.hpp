// Scores of scanned keys, and which tokens are to be refined.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ahead.hpp"
#include "select.hpp"
#include "unit.hpp"
#include "weigh.hpp"

namespace {

// What the scores of a few rows and one page are made of.
struct Factors {
    Each scale, noise, base;
};

// q.c of some rows; `centroid` in halves.
template <int COUNT>
inline Each centroid_products(const float* q, const uint8_t* centroid, int64_t rows) {
    Sixteen c[COUNT], sum[FEW] = {};
    UNROLLED for (int i = 0; i < COUNT; ++i) c[i] = load_halves(centroid + 32 * i);
    for (int64_t r = 0; r < rows; ++r) sum[r] = product_of(q + r * 16 * COUNT, c);
    return Each::of(fold16(sum));
}

inline Each centroid_scores(const float* q, const uint8_t* centroid, int64_t dim, int64_t rows, Workspace& s) {
    if (dim == 128) return centroid_products<8>(q, centroid, rows);
    if (dim == 64) return centroid_products<4>(q, centroid, rows);
    Each found = {};
    float *product = room(s.product, 2 * dim), *c = product + dim;
    halves_to_floats(centroid, dim, c);
    for (int64_t r = 0; r < rows; ++r, q += dim) {
        for (int64_t d = 0; d < dim; ++d) product[d] = q[d] * c[d];
        found.row[r] = fold_sum(product, dim);
    }
    return found;
}

// Also keeps q.c of the page. A unit of the levels of one half can be taken into the scale: that rounds nothing.
inline Factors factors(const Layout& l, const Queries& q, float noise_factor, Unit& u, int64_t page, int64_t first, int64_t rows, Workspace& s) {
    const int64_t row = u.first + first;
    Factors found = {{}, {}, centroid_scores(q.rotated + row * l.dim, u.centroid(l, KEYS, page), l.dim, rows, s)};
    const float unit = level_unit(l.scan_bits[KEYS]);
    for (int64_t r = 0; r < rows; ++r) {
        found.scale.row[r] = q.scale[row + r] * unit, found.noise.row[r] = q.norm2[row + r] * noise_factor;
        u.base[(first + r) * u.pages() + page] = found.base.row[r];
    }
    return found;
}

// Scores of a page's tokens, and p = 2^(score - the largest of the page).
template <int V>
inline void score_page(const Layout& l, const Queries& q, float noise_factor, Unit& u, int64_t page, Workspace& s, Ahead& ahead) {
    for (int64_t first = 0; first < u.rows; first += FEW) {
        const int64_t rows = std::min(FEW, u.rows - first), at = first * u.total + page * l.tokens;
        ahead.step(size_t(12 * rows));
        const Factors f = factors(l, q, noise_factor, u, page, first, rows, s);
        with_rows(rows, [&](auto count) {
            const Each most = score_rows<V, count>(&u.levels[at], u.total, f.scale, u.scales(l, KEYS, page), f.noise, f.base, &u.scores[at], u.total);
            const Each sum = soften_rows<V, count, false>(&u.scores[at], u.total, most, nullptr, &u.p[at], u.total).sum;
            for (int r = 0; r < count; ++r) u.shift[(first + r) * u.pages() + page] = most.row[r], u.mass[(first + r) * u.pages() + page] = sum.row[r];
        });
    }
}

inline float largest_of(const float* x, int64_t n) {
    float most = x[0];
    for (int64_t i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

// The log-sum-exp of each row over the granule.
inline void log_sums_exp(const Unit& u, Workspace& s, float* to) {
    const int64_t pages = u.pages(), all = u.rows * pages;
    float* part = room(s.product, all + 16);
    for (int64_t r = 0; r < u.rows; ++r) {
        to[r] = largest_of(&u.shift[r * pages], pages);
        for (int64_t page = 0; page < pages; ++page) part[r * pages + page] = u.shift[r * pages + page] - to[r];
    }
    for (int64_t i = 0; i < all; i += 16) store16(part + i, exp2_fast(load16(part + i)) * load16(&u.mass[i]));
    for (int64_t r = 0; r < u.rows; ++r) {
        float sum = 0.0f;
        for (int64_t page = 0; page < pages; ++page) sum += part[r * pages + page];
        to[r] += std::log2(sum);
    }
}

// Chooses the tokens and sends for their low bits.
inline void choose(const Layout& l, const Refinement& refine, Unit& u, Workspace& s, Ahead& ahead) {
    const int64_t share = int64_t(std::ceil(double(u.total) * refine.share)), count = std::min(u.total, std::max(refine.min_tokens, share));
    const int64_t lists = refine.group ? 1 : u.rows, masks = u.total / 16;
    float* log_sums = room(s.log_sum_exp, u.rows);
    if (refine.group && u.rows > 1) log_sums_exp(u, s, log_sums);
    int32_t* tokens = room(u.selected, lists * count + 16);
    select(u.rows, u.total, u.scores.data(), log_sums, refine.group != 0, count, room(s.keys, u.total), room(s.some, u.total + 16), tokens);
    std::fill_n(room(u.taken, lists * masks), lists * masks, uint16_t(0));
    for (int64_t i = 0; i < lists; ++i) {
        const List list = {i, u.rows / lists, count, tokens + i * count};
        u.lists.push_back(list);
        for (int64_t j = 0; j < count; ++j) u.taken[i * masks + list.tokens[j] / 16] |= uint16_t(1 << list.tokens[j] % 16);
        for (Side side : {KEYS, VALUES}) {
            const int64_t bytes = (l.bits[side] - l.scan_bits[side]) * l.dim / 8;
            if (!bytes) continue;
            ahead.expect(count, bytes);
            for (int64_t j = 0; j < count; ++j) ahead.add(u.low_bits(l, side, list.tokens[j]), bytes);
        }
    }
}

// Scans and selects.
template <int V>
inline void begin(const Layout& l, const Queries& q, const Refinement& refine, const Operands& keys, Unit& u, Workspace& s, Ahead& ahead) {
    if (u.total == 0) return;
    room(u.scores, u.rows * u.total), room(u.p, u.rows * u.total), room(u.levels, u.rows * u.total);
    for (int64_t page = 0; page < u.pages(); ++page) {
        keys.dot(u.record[page] + l.planes[KEYS], l.tokens / 8, &u.levels[page * l.tokens], u.total, ahead);
        score_page<V>(l, q, refine.scan_noise, u, page, s, ahead);
    }
    choose(l, refine, u, s, ahead);
}

}  // namespace
