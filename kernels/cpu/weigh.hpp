// Up to four query rows and one page of 16 V tokens: scores, softmax, integer weights. Row by row what is independent, then the rows' sums or
// maxima together: one row alone would wait for its own three times.
#pragma once
#include <cmath>
#include <cstdint>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "numbers.hpp"

namespace {

#define UNROLLED _Pragma("GCC unroll 8")

constexpr int64_t FEW = 4;  // rows

// A number for each of the rows.
struct Each {
    float row[FEW];
    static Each of(Four x) { Each each; std::memcpy(each.row, &x, sizeof x); return each; }
};

// Scores: level * scale * a + noise * a^2 + base, for scales `a` and their squares; the row's largest score.
template <int V>
inline Each score_rows(int64_t rows, const int32_t* level, int64_t level_stride, const Each& scale, const float* a, const Each& noise, const float* squares, const Each& base, float* __restrict to, int64_t stride) {
    Sixteen most[FEW] = {};
    for (int64_t r = 0; r < rows; ++r, level += level_stride, to += stride) {
        Sixteen best[2];
        UNROLLED for (int i = 0; i < V; ++i) {
            const Sixteen coded = __builtin_convertvector(load16(level + 16 * i), Sixteen) * scale.row[r] * load16(a + 16 * i);
            const Sixteen score = coded + noise.row[r] * load16(squares + 16 * i) + base.row[r];
            store16(to + 16 * i, score);
            best[i % 2] = i < 2 ? score : larger(score, best[i % 2]);
        }
        most[r] = larger(best[0], best[1]);
    }
    return Each::of(most16(most));
}

struct Weighed {
    Each sum, most;
};

// SOFTEN: p = 2^(x - shift) instead of x. WEIGH: what is stored are the weights p * a, else p. The sums of p, the largest weights.
template <int V, bool SOFTEN, bool WEIGH>
inline Weighed weigh_rows(int64_t rows, const float* x, int64_t stride, const Each& shift, const float* a, float* to, int64_t to_stride) {
    Sixteen sum[FEW] = {}, most[FEW] = {};
    for (int64_t r = 0; r < rows; ++r, x += stride, to += to_stride) {
        Sixteen total[2], best[2];
        UNROLLED for (int i = 0; i < V; ++i) {
            const Sixteen p = SOFTEN ? exp2_by_table(load16(x + 16 * i) - shift.row[r]) : load16(x + 16 * i), w = WEIGH ? p * load16(a + 16 * i) : p;
            store16(to + 16 * i, w);
            total[i % 2] = i < 2 ? p : total[i % 2] + p;
            if (WEIGH) best[i % 2] = i < 2 ? w : larger(w, best[i % 2]);
        }
        sum[r] = total[0] + total[1];
        if (WEIGH) most[r] = larger(best[0], best[1]);
    }
    return {Each::of(fold16(sum)), Each::of(most16(most))};
}

// Weights, not negative, with their largest -> integers 0..127 [rows][16 V]; their scales, max / 127. Below 2^-100 a page cannot count beside
// the granule's largest weight, and the quotient would overflow.
template <int V>
inline Each quantize_rows(int64_t rows, const float* w, int64_t stride, const Each& most, int8_t* integers) {
    Each size, factor;
    for (int r = 0; r < FEW; ++r) size.row[r] = most.row[r] / 127.0f, factor.row[r] = most.row[r] < 7.9e-31f ? 0.0f : 127.0f / most.row[r];
    for (int64_t r = 0; r < rows; ++r, w += stride, integers += 16 * V) {
#ifdef __AVX512F__
        UNROLLED for (int i = 0; i < V; i += 4) {
            __m512i n[4];
            UNROLLED for (int j = 0; j < 4; ++j) n[j] = _mm512_cvtps_epi32((__m512)(load16(w + 16 * (i + j)) * factor.row[r]));
            const __m512i four = _mm512_packus_epi16(_mm512_packus_epi32(n[0], n[1]), _mm512_packus_epi32(n[2], n[3]));
            _mm512_storeu_si512(integers + 16 * i, _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), four));
        }
#else
        for (int i = 0; i < V; ++i) store_bytes(integers + 16 * i, (SixteenInts)(load16(w + 16 * i) * factor.row[r] + ROUNDER));
#endif
    }
    return size;
}

}  // namespace
