// Exact causal attention of prompt queries: keys in blocks, online softmax (Milakov and Gimelshein, arXiv:1805.02867), nothing of the size
// queries x keys in memory. A query's result depends on its own keys alone: blocks stand at fixed positions and every sum has one order,
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
constexpr int WIDE = 16, ACROSS = 4;  // registers of a tile: 6 x 4 sums
inline Wide wide_load(const float* x) { return _mm512_loadu_ps(x); }
inline void wide_store(float* x, Wide v) { _mm512_storeu_ps(x, v); }
inline Wide wide_all(float x) { return _mm512_set1_ps(x); }
inline Wide wide_fma(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a, b, c); }
#else
typedef __m256 Wide;
constexpr int WIDE = 8, ACROSS = 2;
inline Wide wide_load(const float* x) { return _mm256_loadu_ps(x); }
inline void wide_store(float* x, Wide v) { _mm256_storeu_ps(x, v); }
inline Wide wide_all(float x) { return _mm256_set1_ps(x); }
inline Wide wide_fma(Wide a, Wide b, Wide c) { return _mm256_fmadd_ps(a, b, c); }
#endif

constexpr int64_t KEYS = 64, DOWN = 6;  // keys of a block; query rows of a tile

// c[r][j] += sum over i of a[r][i] b[i][j] for DOWN rows and COUNT registers of columns; row strides in floats.
template <int COUNT>
inline void tile(int64_t inner, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride) {
    Wide sum[DOWN][COUNT];
    for (int r = 0; r < DOWN; ++r)
        for (int j = 0; j < COUNT; ++j) sum[r][j] = wide_load(c + r * c_stride + j * WIDE);
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
inline void product(int64_t inner, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t columns, float* c) {
    int64_t j = 0;
    for (; j + ACROSS * WIDE <= columns; j += ACROSS * WIDE) tile<ACROSS>(inner, a, a_stride, b + j, b_stride, c + j, columns);
    for (; j < columns; j += WIDE) tile<1>(inner, a, a_stride, b + j, b_stride, c + j, columns);
}

// One row's scores of a block become weights 2^(score - max); scales what the row has so far. Keys from `visible` on are not its own.
inline void soften(int64_t visible, float* scores, float* m, float* l, int64_t dim, float* o) {
    for (int64_t j = visible; j < KEYS; ++j) scores[j] = -INFINITY;
    const float block = max16(scores, KEYS), peak = block > *m ? block : *m;
    const float kept = exp2_fast(*m - peak);
    exp2_shifted(scores, peak, KEYS, scores);
    *l = *l * kept + sum16(scores, KEYS);
    *m = peak;
    if (kept != 1.0f)
        for (int64_t d = 0; d < dim; ++d) o[d] *= kept;
}

// Rows first <= row < last of one KV head's queries q [group * n, D] (the group's heads, each with the last n of `total` positions) over
// keys and values [total, D]; scale includes log2 e. out like q.
inline void attend_prompt(int64_t dim, int64_t n, int64_t total, float scale, const float* q, const float* k, const float* v, int64_t first, int64_t last,
                          float* out) {
    const int64_t width = (dim + WIDE - 1) / WIDE * WIDE, rows = (last - first + DOWN - 1) / DOWN * DOWN;
    thread_local std::vector<float> query, sums, turned, values, peak, mass;
    query.assign(rows * dim, 0.0f), sums.assign(rows * width, 0.0f), peak.assign(rows, -INFINITY), mass.assign(rows, 0.0f);
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
            float scores[DOWN * KEYS] = {};
            int64_t visible[DOWN], widest = 0;
            for (int64_t i = 0; i < DOWN; ++i) {
                const int64_t own = seen(first + r + i) - start;
                visible[i] = own < 0 ? 0 : own < KEYS ? own : KEYS;
                widest = visible[i] > widest ? visible[i] : widest;
            }
            if (widest == 0) continue;
            product(dim, &query[r * dim], dim, turned.data(), KEYS, KEYS, scores);
            for (int64_t i = 0; i < DOWN; ++i)
                if (visible[i]) soften(visible[i], scores + i * KEYS, &peak[r + i], &mass[r + i], width, &sums[(r + i) * width]);
                else std::memset(scores + i * KEYS, 0, KEYS * sizeof(float));
            product(widest, scores, KEYS, values.data(), width, width, &sums[r * width]);
        }
    }
    for (int64_t row = first; row < last; ++row)
        for (int64_t d = 0; d < dim; ++d) out[row * dim + d] = sums[(row - first) * width + d] / mass[row - first];
}

}  // namespace
#endif
