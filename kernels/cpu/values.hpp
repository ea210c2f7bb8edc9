// The second half of a unit: scores of the refined tokens by their full codes, the softmax, and the sums of values.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ahead.hpp"
#include "level_dot.hpp"
#include "token_codes.hpp"
#include "unit.hpp"

namespace {

inline const float* full_scales(const Layout& l, Side side, const Unit& u, const List& list, Workspace& s) {
    float* scale = room(s.scales, list.count);
    for (int64_t i = 0; i < list.count; ++i) halves_to_floats(u.full_scale(l, side, list.tokens[i]), 1, scale + i);
    return scale;
}

// Scores of a list's tokens by their full codes.
inline void rescore(const Layout& l, const Queries& q, float noise_factor, const List& list, Unit& u, Workspace& s) {
    const int64_t D = l.dim, pages = u.pages(), low = l.bits[KEYS] - l.scan_bits[KEYS];
    s.bits.clear();
    for (int64_t i = 0; i < list.count; ++i) s.bits.push_back(u.low_bits(l, KEYS, list.tokens[i]));
    int32_t* dots = room(s.dots, list.rows * list.count);
    const int8_t* codes = q.codes + (u.first + list.row) * D;
    token_dots(s.bits.data(), list.count, low, D, codes, list.rows, dots);
    const float* a = full_scales(l, KEYS, u, list, s);
    for (int64_t r = 0; r < list.rows; ++r) {
        const int64_t row = list.row + r;
        const float scale = q.scale[u.first + row], noise = q.norm2[u.first + row] * noise_factor;
        int32_t code_sum = 0;
        for (int64_t d = 0; d < D; ++d) code_sum += codes[r * D + d];
        for (int64_t i = 0; i < list.count; ++i) {
            const int64_t t = list.tokens[i];
            // 2 code - (2^B - 1) = 2^low (2 top - (2^S - 1)) + 2 bits - (2^low - 1)
            const int32_t level = u.levels[row * list.count + i] * (1 << low) + 2 * dots[r * list.count + i] - ((1 << low) - 1) * code_sum;
            u.scores[row * u.total + t] = (float(level) * scale * (a[i] * 0.5f) + noise * (a[i] * a[i])) + u.base[row * pages + t / l.tokens];
        }
    }
}

// p = 2^(score - m), and m of every row. Where p is there for the scores before some were refined, it is moved to the new maximum.
inline void soften(Unit& u, float* m) {
    for (int64_t r = 0; r < u.rows; ++r) {
        const float* scores = &u.scores[r * u.total];
        float* p = room(u.p, u.rows * u.total) + r * u.total;
        m[r] = max16(scores, u.total);
        if (!u.shifted || !(std::fabs(u.peak[r] - m[r]) < 32.0f)) {
            exp2_shifted(scores, m[r], u.total, p);
            continue;
        }
        const float factor = exp2_fast(u.peak[r] - m[r]);
        for (int64_t t = 0; t < u.total; t += 16) store16(p + t, load16(p + t) * factor);
        const List& list = u.lists[0];
        for (int64_t i = 0; i < list.count; ++i) p[list.tokens[i]] = exp2_fast(scores[list.tokens[i]] - m[r]);
    }
}

// Weights fp32 [n], n a multiple of 16 -> integers 0..127; returns their scale, max / 127. Below 2^-100 a page cannot count beside the
// granule's largest weight, and the quotient would overflow.
inline float quantize_weights(const float* weights, int64_t n, int8_t* integers) {
    const float peak = max16(weights, n), factor = peak < 7.9e-31f ? 0.0f : 127.0f / peak;
    for (int64_t t = 0; t < n; t += 16) store_bytes(integers + t, (SixteenInts)(load16(weights + t) * factor + ROUNDER));
    return peak / 127.0f;
}

// o += mass * centroid + sum of weights times scanned values of a page, for all rows; weights fp32 [rows][P], mass [rows].
inline void add_scanned(const Layout& l, const Unit& u, int64_t page, Workspace& s, Ahead& ahead, float* o) {
    const int64_t P = l.tokens, D = l.dim;
    int8_t* integers = room(s.integers, u.rows * P);
    int32_t* levels = room(s.levels, u.rows * D);
    float* scale = room(s.row_scale, u.rows);
    for (int64_t r = 0; r < u.rows; ++r) scale[r] = quantize_weights(&s.weights[r * P], P, integers + r * P) * level_unit(l.scan_bits[VALUES]);
    const uint8_t* words = u.record[page] + l.planes[VALUES];
    level_dot(&words, 1, l.scan_bits[VALUES], P / 4, D / 8, integers, P, u.rows, levels, D, ahead);
    const float* centroid = &u.centroid[VALUES][page * D];
    for (int64_t r = 0; r < u.rows; ++r) {
        const float mass = s.mass[r], size = scale[r];
        const int32_t* level = levels + r * D;
        float* to = o + r * D;
        for (int64_t d = 0; d < D; ++d) to[d] += mass * centroid[d] + float(level[d]) * size;
    }
}

// o += sum of weights times values of a list's tokens, all of one page, by their full codes.
inline void add_refined(const Layout& l, const Unit& u, const List& list, Workspace& s, float* o) {
    const int64_t P = l.tokens, D = l.dim, bytes = D / 8, bits = l.bits[VALUES], scan = l.scan_bits[VALUES], padded = (list.count + 15) / 16 * 16;
    uint8_t* codes = room(s.codes, list.count * bits * bytes);
    for (int64_t i = 0; i < list.count; ++i) {
        const uint8_t* words = u.record[list.tokens[i] / P] + l.planes[VALUES];
        uint8_t* to = codes + i * bits * bytes;
        for (int64_t plane = 0; plane < scan; ++plane) value_bits(words + plane * P * bytes, D, list.tokens[i] % P, to + plane * bytes);
        std::memcpy(to + scan * bytes, u.low_bits(l, VALUES, list.tokens[i]), size_t((bits - scan) * bytes));
    }
    const float* a = full_scales(l, VALUES, u, list, s);
    int8_t* integers = room(s.integers, list.rows * padded);
    float *weights = room(s.weights, padded), *scale = room(s.row_scale, list.rows);
    int32_t *sums = room(s.levels, list.rows * D), *offset = room(s.offset, list.rows);
    for (int64_t i = list.count; i < padded; ++i) weights[i] = 0.0f;
    for (int64_t r = 0; r < list.rows; ++r) {
        for (int64_t i = 0; i < list.count; ++i) weights[i] = u.p[(list.row + r) * u.total + list.tokens[i]] * a[i];
        scale[r] = quantize_weights(weights, padded, integers + r * padded) * 0.5f;
        offset[r] = 0;
        for (int64_t i = 0; i < list.count; ++i) offset[r] += integers[r * padded + i];
    }
    token_sums(codes, list.count, bits, D, integers, padded, list.rows, sums);
    for (int64_t r = 0; r < list.rows; ++r) {
        const int32_t shift = ((1 << bits) - 1) * offset[r], *sum = sums + r * D;
        const float size = scale[r];
        float* to = o + (list.row + r) * D;
        for (int64_t d = 0; d < D; ++d) to[d] += float(2 * sum[d] - shift) * size;
    }
}

// The values of all pages: partials l, o of the rows.
inline void add_values(const Layout& l, Unit& u, Workspace& s, Ahead& ahead, float* l_out, float* o) {
    const int64_t P = l.tokens;
    const size_t lists = l.scan_bits[VALUES] < l.bits[VALUES] ? u.lists.size() : 0;
    u.load(l, VALUES);
    float* mass = room(s.mass, u.rows);
    s.end.assign(lists, 0);
    for (int64_t page = 0; page < u.pages(); ++page) {
        float* weights = room(s.weights, u.rows * P);
        const float* a = &u.scale[VALUES][page * P];
        for (int64_t r = 0; r < u.rows; ++r) {
            const float* p = &u.p[r * u.total + page * P];
            ahead.step(12);
            mass[r] = sum16(p, P);
            l_out[r] += mass[r];
            for (int64_t t = 0; t < P; t += 16) store16(weights + r * P + t, load16(p + t) * load16(a + t));
        }
        s.lists.clear();
        for (size_t i = 0; i < lists; ++i) {
            const List& list = u.lists[i];
            int64_t &end = s.end[i], first = end;
            while (end < list.count && list.tokens[end] < (page + 1) * P) ++end;
            if (end > first) s.lists.push_back({list.row, list.rows, end - first, list.tokens + first});
            for (int64_t r = list.row; r < list.row + list.rows; ++r)
                for (int64_t j = first; j < end; ++j) weights[r * P + list.tokens[j] - page * P] = 0.0f;
        }
        add_scanned(l, u, page, s, ahead, o);
        for (const List& list : s.lists) add_refined(l, u, list, s, o);
    }
}

// Tokens in any of the lists.
inline int64_t count_refined(const Unit& u) {
    if (u.lists.size() <= 1) return u.lists.empty() ? 0 : u.lists[0].count;
    std::vector<uint8_t> mark(u.total);
    int64_t refined = 0;
    for (const List& list : u.lists)
        for (int64_t i = 0; i < list.count; ++i) refined += !mark[list.tokens[i]], mark[list.tokens[i]] = 1;
    return refined;
}

// Partials m, l [rows], o [rows][D] of a unit that was begun; returns the tokens refined.
inline int64_t finish(const Layout& l, const Queries& q, const Refinement& refine, Unit& u, Workspace& s, Ahead& ahead, float* m, float* l_out, float* o) {
    std::fill_n(l_out, u.rows, 0.0f);
    std::fill_n(o, u.rows * l.dim, 0.0f);
    if (u.total == 0) {
        std::fill_n(m, u.rows, -INFINITY);
        return 0;
    }
    if (l.scan_bits[KEYS] < l.bits[KEYS])
        for (const List& list : u.lists) rescore(l, q, refine.full_noise, list, u, s);
    soften(u, m);
    add_values(l, u, s, ahead, l_out, o);
    return count_refined(u);
}

}  // namespace
