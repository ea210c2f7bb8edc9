// attend_prompt (prompt.hpp) of a model in bfloat16: products of bfloat16 pairs with float32 sums (AVX512_BF16), twice as many a cycle.
// Scores, softmax and the outputs' sums are float32; only weights are rounded, and divided by the sum of the rounded ones. As there, a
// query's result depends on its own keys alone if all values are finite.
#pragma once
#ifdef __AVX512BF16__
#include "linear.hpp"
#include "prompt.hpp"

namespace {

constexpr int64_t PAIRED = 64;  // keys of a block: the outputs' sums are loaded and stored once for so many

// c[r][j] (+)= sum over i of the two products of a[r][i] b[i][j], for DOWN rows and COUNT registers of columns; a and b hold pairs.
template <bool ADD, int COUNT>
inline void paired_tile(int64_t pairs, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c, int64_t c_stride) {
    Wide sum[DOWN][COUNT];
    for (int r = 0; r < DOWN; ++r)
        for (int j = 0; j < COUNT; ++j) sum[r][j] = ADD ? wide_load(c + r * c_stride + j * WIDE) : wide_all(0.0f);
    for (int64_t i = 0; i < pairs; ++i) {
        __m512bh row[COUNT];
        for (int j = 0; j < COUNT; ++j) row[j] = (__m512bh)_mm512_loadu_si512(b + i * b_stride + j * WIDE);
        for (int r = 0; r < DOWN; ++r) {
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(int32_t(a[r * a_stride + i]));
            for (int j = 0; j < COUNT; ++j) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], factor, row[j]);
        }
    }
    for (int r = 0; r < DOWN; ++r)
        for (int j = 0; j < COUNT; ++j) wide_store(c + r * c_stride + j * WIDE, sum[r][j]);
}

// The same for any number of columns that is a multiple of WIDE.
template <bool ADD>
inline void paired_product(int64_t pairs, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t columns, float* c) {
    int64_t j = 0;
    for (; j + ACROSS * WIDE <= columns; j += ACROSS * WIDE) paired_tile<ADD, ACROSS>(pairs, a, a_stride, b + j, columns, c + j, columns);
    for (; j < columns; j += WIDE) paired_tile<ADD, 1>(pairs, a, a_stride, b + j, columns, c + j, columns);
}

// 2^x, 0 far below 1; relative error below 2^-13, a sixteenth of what rounding to bfloat16 adds. NaN stays NaN.
inline Wide rough_exp2(Wide x) {
    const Wide y = wide_max(wide_all(-1000.0f), x), whole = _mm512_roundscale_ps(y, 0), f = y - whole;
    Wide p = wide_all(5.517167e-2f);
    for (const float coefficient : {2.4261113e-1f, 6.9326099e-1f, 9.9992807e-1f}) p = wide_fma(p, f, wide_all(coefficient));
    return _mm512_scalef_ps(p, whole);
}

// One row's scores of a block become bfloat16 weights 2^(scale (score - m)), m the largest score so far; their sum goes to l, 16 running
// sums. Keys from `visible` on are not the row's own.
inline void paired_soften(int64_t visible, float scale, float* scores, float* m, float* l, int64_t width, float* o, uint32_t* weights) {
    for (int64_t j = visible; j < PAIRED; ++j) scores[j] = -INFINITY;
    Wide score[PAIRED / WIDE], most = score[0] = wide_load(scores);
    for (int j = 1; j < PAIRED / WIDE; ++j) most = wide_max(most, score[j] = wide_load(scores + j * WIDE));
    if (any_above(most, wide_all(*m))) {
        const float peak = max16(scores, PAIRED), kept = exp2_fast((*m - peak) * scale);
        *m = peak;
        for (int j = 0; j < 16; ++j) l[j] *= kept;
        for (int64_t d = 0; d < width; ++d) o[d] *= kept;
    }
    const Wide top = wide_all(*m);  // taken off before the scale: the product of the largest score would be rounded, by more than 1 if it is huge
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(int32_t(0xffff0000));
    Wide all = wide_load(l);
    for (int j = 0; j < PAIRED / WIDE; ++j) {
        const Wide weight = rough_exp2((score[j] - top) * wide_all(scale));
        score[j] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(weight), half), upper));
        all = all + score[j];
    }
    wide_store(l, all);
    alignas(64) static constexpr int16_t UPPER[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    for (int j = 0; j < PAIRED / WIDE; j += 2)
        _mm512_storeu_si512(weights + j / 2 * WIDE, _mm512_permutex2var_epi16(_mm512_castps_si512(score[j]), _mm512_load_si512(UPPER),
                                                                             _mm512_castps_si512(score[j + 1])));
}

// Rows first <= row < last of one KV head's queries q [group * n, D] (the group's heads, each with the last n of `total` positions) over
// keys and values [total, D], all bfloat16 with D even; scale, above 0, includes log2 e. out like q.
inline void attend_prompt_bfloat16(int64_t dim, int64_t n, int64_t total, float scale, const uint16_t* q, const uint16_t* k, const uint16_t* v,
                                   int64_t first, int64_t last, uint16_t* out) {
    const int64_t width = (dim + WIDE - 1) / WIDE * WIDE, pairs = dim / 2, rows = (last - first + DOWN - 1) / DOWN * DOWN;
    thread_local std::vector<uint32_t> query, turned, values;
    thread_local std::vector<float> sums, peak, mass;
    query.assign(rows * pairs, 0), sums.assign(rows * width, 0.0f), peak.assign(rows, -INFINITY), mass.assign(rows * 16, 0.0f);
    turned.assign(pairs * PAIRED, 0), values.assign(PAIRED / 2 * width, 0);
    std::memcpy(query.data(), q + first * dim, (last - first) * dim * sizeof(uint16_t));
    const auto seen = [&](int64_t row) { return row < last ? total - n + row % n + 1 : 0; };  // keys that a row sees
    int64_t most = 0;
    for (int64_t row = first; row < last; ++row) most = seen(row) > most ? seen(row) : most;
    for (int64_t start = 0; start < most; start += PAIRED) {
        const int64_t keys = most - start < PAIRED ? most - start : PAIRED;
        for (int64_t j = 0; j < keys; ++j)
            for (int64_t d = 0; d < pairs; ++d) std::memcpy(&turned[d * PAIRED + j], k + (start + j) * dim + 2 * d, sizeof(uint32_t));
        for (int64_t j = 0; j < keys; j += 2) {
            const uint16_t *even = v + (start + j) * dim, *odd = even + dim;
            for (int64_t d = 0; d < dim; ++d) values[j / 2 * width + d] = even[d] | (j + 1 < keys ? uint32_t(odd[d]) << 16 : 0);
        }
        for (int64_t r = 0; r < rows; r += DOWN) {
            float scores[DOWN * PAIRED];
            uint32_t weights[DOWN * PAIRED / 2];
            int64_t visible[DOWN], widest = 0;
            for (int64_t i = 0; i < DOWN; ++i) {
                const int64_t own = seen(first + r + i) - start;
                visible[i] = own < 0 ? 0 : own < PAIRED ? own : PAIRED;
                widest = visible[i] > widest ? visible[i] : widest;
            }
            if (widest == 0) continue;
            paired_product<false>(pairs, &query[r * pairs], pairs, turned.data(), PAIRED, scores);
            for (int64_t i = 0; i < DOWN; ++i)
                if (visible[i])
                    paired_soften(visible[i], scale, scores + i * PAIRED, &peak[r + i], &mass[(r + i) * 16], width, &sums[(r + i) * width],
                                  weights + i * PAIRED / 2);
                else
                    std::memset(weights + i * PAIRED / 2, 0, PAIRED / 2 * sizeof(uint32_t));
            paired_product<true>((widest + 1) / 2, weights, PAIRED / 2, values.data(), width, &sums[r * width]);
        }
    }
    for (int64_t r = 0; r < last - first; ++r) {
        const float all = fold16(load16(&mass[r * 16]));
        float* row = &sums[r * width];
        for (int64_t d = 0; d < width; ++d) row[d] /= all;
        narrow(dim, row, out + (first + r) * dim);
    }
}

}  // namespace
#endif
