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

// What one row's scores of a page are made of.
struct Factors {
    float scale, noise, base;
};

// Levels of a page's keys, int32 [rows][stride], its scales and their squares.
inline void scan_page(const Layout& l, const Operands& keys, Unit& u, int64_t page, int32_t* levels, int64_t stride, Workspace& s, Ahead& ahead) {
    keys.dot(u.record[page] + l.planes[KEYS], l.tokens / 8, levels, stride, ahead);
    u.load(l, KEYS, page);
    const float* a = &u.scale[KEYS][page * l.tokens];
    float* squares = room(s.squares, l.tokens);
    for (int64_t t = 0; t < l.tokens; t += 16) store16(squares + t, load16(a + t) * load16(a + t));
}

// Also keeps q.c of the page. An exact half as the levels' unit can be taken into the scale.
inline Factors factors(const Layout& l, const Queries& q, float noise_factor, Unit& u, int64_t page, int64_t r, Workspace& s) {
    const int64_t row = u.first + r;
    const float base = fold_product(q.rotated + row * l.dim, &u.centroid[KEYS][page * l.dim], l.dim, room(s.product, l.dim));
    u.base[r * u.pages() + page] = base;
    return {q.scale[row] * level_unit(l.scan_bits[KEYS]), q.norm2[row] * noise_factor, base};
}

// Scores of a page's tokens, and p = 2^(score - the largest of the page).
template <int V>
inline void score_page(const Layout& l, const Queries& q, float noise_factor, Unit& u, int64_t page, Workspace& s, Ahead& ahead) {
    for (int64_t r = 0; r < u.rows; ++r) {
        ahead.step(12);
        const Factors f = factors(l, q, noise_factor, u, page, r, s);
        const int64_t at = r * u.total + page * l.tokens;
        Sixteen x[V];
        score_row<V>(&u.levels[at], f.scale, &u.scale[KEYS][page * l.tokens], f.noise, s.squares.data(), x);
        UNROLLED for (int i = 0; i < V; ++i) x[i] += f.base, store16(&u.scores[at + 16 * i], x[i]);
        const float shift = largest_of<V>(x);
        u.shift[r * u.pages() + page] = shift;
        u.mass[r * u.pages() + page] = soften_row<V>(x, shift);
        UNROLLED for (int i = 0; i < V; ++i) store16(&u.p[at + 16 * i], x[i]);
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
    int32_t* tokens = room(u.selected, lists * count);
    select(u.rows, u.total, u.scores.data(), log_sums, refine.group != 0, count, room(s.keys, u.total), room(s.some, u.total + 16), tokens);
    int32_t* kept = room(u.kept, u.rows * count);
    for (int64_t i = 0; i < lists; ++i) {
        const List list = {i, u.rows / lists, count, tokens + i * count};
        u.lists.push_back(list);
        for (int64_t r = list.row; r < list.row + list.rows; ++r)
            for (int64_t j = 0; j < count; ++j) kept[r * count + j] = u.levels[r * u.total + list.tokens[j]];
        for (int64_t j = 0; j < count; ++j)
            for (Side side : {KEYS, VALUES}) {
                const int64_t low = l.bits[side] - l.scan_bits[side];
                if (low) ahead.add(u.low_bits(l, side, list.tokens[j]), low * l.dim / 8), ahead.add(u.full_scale(l, side, list.tokens[j]), 1);
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
