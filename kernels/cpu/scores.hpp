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

// Levels of a page's keys, int32 [rows][stride], its scales and their squares.
inline void scan_page(const Layout& l, const Operands& keys, Unit& u, int64_t page, int32_t* levels, int64_t stride, Workspace& s, Ahead& ahead) {
    keys.dot(u.record[page] + l.planes[KEYS], l.tokens / 8, levels, stride, ahead);
    u.load(l, KEYS, page);
    const float* a = &u.scale[KEYS][page * l.tokens];
    float* squares = room(s.squares, l.tokens);
    for (int64_t t = 0; t < l.tokens; t += 16) store16(squares + t, load16(a + t) * load16(a + t));
}

// q.c of some rows.
inline Each centroid_scores(const float* q, const float* centroid, int64_t dim, int64_t rows, float* product) {
    Each found = {};
    if (dim == 128 || dim == 64) {
        Sixteen sum[FEW] = {};
        for (int64_t r = 0; r < rows; ++r, q += dim) sum[r] = dim == 128 ? product_of<8>(q, centroid) : product_of<4>(q, centroid);
        return Each::of(fold16(sum));
    }
    for (int64_t r = 0; r < rows; ++r, q += dim) {
        for (int64_t d = 0; d < dim; ++d) product[d] = q[d] * centroid[d];
        found.row[r] = fold_sum(product, dim);
    }
    return found;
}

// Also keeps q.c of the page. A unit of the levels of one half can be taken into the scale: that rounds nothing.
inline Factors factors(const Layout& l, const Queries& q, float noise_factor, Unit& u, int64_t page, int64_t first, int64_t rows, Workspace& s) {
    const int64_t row = u.first + first;
    Factors found = {{}, {}, centroid_scores(q.rotated + row * l.dim, &u.centroid[KEYS][page * l.dim], l.dim, rows, room(s.product, l.dim))};
    for (int64_t r = 0; r < rows; ++r) {
        found.scale.row[r] = q.scale[row + r] * level_unit(l.scan_bits[KEYS]), found.noise.row[r] = q.norm2[row + r] * noise_factor;
        u.base[(first + r) * u.pages() + page] = found.base.row[r];
    }
    return found;
}

// Scores of a page's tokens, and p = 2^(score - the largest of the page).
template <int V>
inline void score_page(const Layout& l, const Queries& q, float noise_factor, Unit& u, int64_t page, Workspace& s, Ahead& ahead) {
    const float* a = &u.scale[KEYS][page * l.tokens];
    for (int64_t first = 0; first < u.rows; first += FEW) {
        const int64_t rows = std::min(FEW, u.rows - first), at = first * u.total + page * l.tokens;
        ahead.step(size_t(12 * rows));
        const Factors f = factors(l, q, noise_factor, u, page, first, rows, s);
        const Each most = score_rows<V>(rows, &u.levels[at], u.total, f.scale, a, f.noise, s.squares.data(), f.base, &u.scores[at], u.total);
        const Each sum = weigh_rows<V, true, false>(rows, &u.scores[at], u.total, most, nullptr, &u.p[at], u.total).sum;
        for (int64_t r = 0; r < rows; ++r) u.shift[(first + r) * u.pages() + page] = most.row[r], u.mass[(first + r) * u.pages() + page] = sum.row[r];
    }
}

// The log-sum-exp of one row over the granule.
inline float log_sum_exp(const Unit& u, int64_t r) {
    const float *shift = &u.shift[r * u.pages()], *mass = &u.mass[r * u.pages()];
    const float most = max16(shift, u.pages());
    float sum = 0.0f;
    for (int64_t page = 0; page < u.pages(); ++page) sum += mass[page] * exp2_fast(shift[page] - most);
    return most + std::log2(sum);
}

// Chooses the tokens, keeps the levels of their scanned keys, and sends for what the scan did not read.
inline void choose(const Layout& l, const Refinement& refine, Unit& u, Workspace& s, Ahead& ahead) {
    const int64_t share = int64_t(std::ceil(double(u.total) * refine.share)), count = std::min(u.total, std::max(refine.min_tokens, share));
    const int64_t lists = refine.group ? 1 : u.rows;
    float* log_sums = room(s.log_sum_exp, u.rows);
    if (refine.group && u.rows > 1)
        for (int64_t r = 0; r < u.rows; ++r) log_sums[r] = log_sum_exp(u, r);
    const int64_t whole = List{0, 0, count, nullptr}.whole();
    int32_t* tokens = room(u.selected, lists * count + 16);
    select(u.rows, u.total, u.scores.data(), log_sums, refine.group != 0, count, room(s.keys, u.total), room(s.some, u.total + 16), tokens);
    int32_t* kept = room(u.kept, u.rows * whole);
    for (int64_t i = 0; i < lists; ++i) {
        const List list = {i, u.rows / lists, count, tokens + i * count};
        u.lists.push_back(list);
        for (int64_t r = list.row; r < list.row + list.rows; ++r)
            for (int64_t j = 0; j < count; ++j) kept[r * whole + j] = u.levels[r * u.total + list.tokens[j]];
        for (Side side : {KEYS, VALUES}) {
            const int64_t bytes = (l.bits[side] - l.scan_bits[side]) * l.dim / 8;
            if (!bytes) continue;
            ahead.expect(2 * count, bytes);
            for (int64_t j = 0; j < count; ++j) ahead.add(u.low_bits(l, side, list.tokens[j]), bytes), ahead.add(u.full_scale(l, side, list.tokens[j]), 1);
        }
    }
}

// Scans and selects.
template <int V>
inline void begin(const Layout& l, const Queries& q, const Refinement& refine, const Operands& keys, Unit& u, Workspace& s, Ahead& ahead) {
    if (u.total == 0) return;
    room(u.scores, u.rows * u.total), room(u.p, u.rows * u.total), room(u.levels, u.rows * u.total);
    for (int64_t page = 0; page < u.pages(); ++page) {
        scan_page(l, keys, u, page, &u.levels[page * l.tokens], u.total, s, ahead);
        score_page<V>(l, q, refine.scan_noise, u, page, s, ahead);
    }
    choose(l, refine, u, s, ahead);
}

}  // namespace
