// Exact causal attention of prompt queries: keys in blocks, online softmax (Milakov and Gimelshein, arXiv:1805.02867), nothing of the size
// queries x keys in memory. If all values are finite, a query's result depends on its own keys alone: blocks stand at fixed positions and every sum has one order,
// whatever the other rows, the chunks or the threads. Fused multiply-add, unlike elsewhere: it is half the time, and no stored byte depends
// on it more than on torch's matrix products. Needs AVX2 and FMA.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "interface.hpp"
#include "numbers.hpp"

#ifdef __FMA__
#include <immintrin.h>

namespace {

#ifdef __AVX512F__
typedef __m512 Wide;
constexpr int WIDE = 16, DOWN = 12;
inline Wide wide_load(const float* x) { return _mm512_loadu_ps(x); }
inline void wide_store(float* x, Wide v) { _mm512_storeu_ps(x, v); }
inline Wide wide_all(float x) { return _mm512_set1_ps(x); }
inline Wide wide_fma(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a, b, c); }
inline Wide wide_max(Wide a, Wide b) { return _mm512_max_ps(a, b); }
inline bool any_above(Wide a, Wide b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Wide wide_power(Wide shifted) {  // 2^n of shifted = ROUNDER + n
    const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(bits_of(ROUNDER) - 127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}
#else
typedef __m256 Wide;
constexpr int WIDE = 8, DOWN = 6;
inline Wide wide_load(const float* x) { return _mm256_loadu_ps(x); }
inline void wide_store(float* x, Wide v) { _mm256_storeu_ps(x, v); }
inline Wide wide_all(float x) { return _mm256_set1_ps(x); }
inline Wide wide_fma(Wide a, Wide b, Wide c) { return _mm256_fmadd_ps(a, b, c); }
inline Wide wide_max(Wide a, Wide b) { return _mm256_max_ps(a, b); }
inline bool any_above(Wide a, Wide b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline Wide wide_power(Wide shifted) {
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(bits_of(ROUNDER) - 127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
#endif

constexpr int ACROSS = 2;  // a tile is DOWN query rows by ACROSS registers: as many sums as the register file holds
constexpr int64_t KEYS = 32;  // of a block: its keys and values fit the first-level cache together

// c[r][j] (+)= sum over i of a[r][i] b[i][j] for DOWN rows and COUNT registers of columns; row strides in floats.
template <bool ADD, int COUNT>
inline void tile(int64_t inner, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride) {
    Wide sum[DOWN][COUNT];
    for (int r = 0; r < DOWN; ++r)
        for (int j = 0; j < COUNT; ++j) sum[r][j] = ADD ? wide_load(c + r * c_stride + j * WIDE) : wide_all(0.0f);
    for (int64_t i = 0; i < inner; ++i) {
        Wide row[COUNT];
        for (int j = 0; j < COUNT; ++j) row[j] = wide_load(b + i * b_stride + j * WIDE);
        for (int r = 0; r < DOWN; ++r) {
            const Wide factor = wide_all(a[r * a_stride + i]);
            for (int j = 0; j < COUNT; ++j) sum[r][j] = wide_fma(factor, row[j], sum[r][j]);
        }
    }
    for (int r = 0; r < DOWN; ++r)
        for (int j = 0; j < COUNT; ++j) wide_store(c + r * c_stride + j * WIDE, sum[r][j]);
}

// The same for any number of columns that is a multiple of WIDE.
template <bool ADD>
inline void product(int64_t inner, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t columns, float* c) {
    int64_t j = 0;
    for (; j + ACROSS * WIDE <= columns; j += ACROSS * WIDE) tile<ADD, ACROSS>(inner, a, a_stride, b + j, b_stride, c + j, columns);
    for (; j < columns; j += WIDE) tile<ADD, 1>(inner, a, a_stride, b + j, b_stride, c + j, columns);
}

// exp2_fast, with fused multiply-add.
inline Wide wide_exp2(Wide x) {
    const Wide y = wide_max(wide_all(-127.0f), x), shifted = y + wide_all(ROUNDER), f = y - (shifted - wide_all(ROUNDER));
    Wide p = wide_all(1.3264727e-3f);
    for (const float coefficient : {9.6715130e-3f, 5.5507336e-2f, 2.4022242e-1f, 6.9314700e-1f, 1.0f}) p = wide_fma(p, f, wide_all(coefficient));
    return p * wide_power(shifted);
}

// One row's scores of a block become weights 2^(score - m), m the largest score so far; their sum goes to l, 16 running sums. Keys from
// `visible` on are not the row's own.
inline void soften(int64_t visible, float* scores, float* m, float* l, int64_t width, float* o) {
    for (int64_t j = visible; j < KEYS; ++j) scores[j] = -INFINITY;
    Wide most = wide_load(scores);
    for (int64_t j = WIDE; j < KEYS; j += WIDE) most = wide_max(most, wide_load(scores + j));
    if (any_above(most, wide_all(*m))) {
        const float peak = max16(scores, KEYS), kept = exp2_fast(*m - peak);
        *m = peak;
        for (int j = 0; j < 16; ++j) l[j] *= kept;
        for (int64_t d = 0; d < width; ++d) o[d] *= kept;
    }
    for (int64_t j = 0; j < KEYS; j += WIDE) {
        const Wide weights = wide_exp2(wide_load(scores + j) - wide_all(*m));
        wide_store(scores + j, weights);
        wide_store(l + j % 16, wide_load(l + j % 16) + weights);
    }
}

// Rows first <= row < last of one KV head's queries q [group * n, D] (the group's heads, each with the last n of `total` positions) over
// keys and values [total, D]; scale includes log2 e. out like q.
inline void attend_prompt(int64_t dim, int64_t n, int64_t total, float scale, const float* q, const float* k, const float* v, int64_t first, int64_t last,
                          float* out) {
    const int64_t width = (dim + WIDE - 1) / WIDE * WIDE, rows = (last - first + DOWN - 1) / DOWN * DOWN;
    thread_local std::vector<float> query, sums, turned, values, peak, mass;
    query.assign(rows * dim, 0.0f), sums.assign(rows * width, 0.0f), peak.assign(rows, -INFINITY), mass.assign(rows * 16, 0.0f);
    turned.assign(dim * KEYS, 0.0f), values.assign(KEYS * width, 0.0f);
    for (int64_t i = 0; i < (last - first) * dim; ++i) query[i] = q[first * dim + i] * scale;
    const auto seen = [&](int64_t row) { return row < last ? total - n + row % n + 1 : 0; };  // keys that a row sees
    int64_t most = 0;
    for (int64_t row = first; row < last; ++row) most = seen(row) > most ? seen(row) : most;
    for (int64_t start = 0; start < most; start += KEYS) {
        const int64_t keys = most - start < KEYS ? most - start : KEYS;
        for (int64_t j = 0; j < keys; ++j)
            for (int64_t d = 0; d < dim; ++d) turned[d * KEYS + j] = k[(start + j) * dim + d];
        for (int64_t j = 0; j < keys; ++j) std::memcpy(&values[j * width], v + (start + j) * dim, dim * sizeof(float));
        for (int64_t r = 0; r < rows; r += DOWN) {
            float scores[DOWN * KEYS];
            int64_t visible[DOWN], widest = 0;
            for (int64_t i = 0; i < DOWN; ++i) {
                const int64_t own = seen(first + r + i) - start;
                visible[i] = own < 0 ? 0 : own < KEYS ? own : KEYS;
                widest = visible[i] > widest ? visible[i] : widest;
            }
            if (widest == 0) continue;
            product<false>(dim, &query[r * dim], dim, turned.data(), KEYS, KEYS, scores);
            for (int64_t i = 0; i < DOWN; ++i)
                if (visible[i]) soften(visible[i], scores + i * KEYS, &peak[r + i], &mass[(r + i) * 16], width, &sums[(r + i) * width]);
                else std::memset(scores + i * KEYS, 0, KEYS * sizeof(float));
            product<true>(widest, scores, KEYS, values.data(), width, width, &sums[r * width]);
        }
    }
    for (int64_t r = 0; r < last - first; ++r) {
        const float all = fold16(load16(&mass[r * 16]));
        for (int64_t d = 0; d < dim; ++d) out[(first + r) * dim + d] = sums[r * width + d] / all;
    }
}

}  // namespace
#endif
