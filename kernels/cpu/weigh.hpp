// Up to four query rows and one page of 16 V tokens: scores, softmax, integer weights. The rows go through each step side by side: one alone
// would wait for its own results, and what belongs to the tokens is then read once. V lines from `fetch` on are asked for on the way.
#pragma once
#include <cmath>
#include <cstdint>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <type_traits>

#include "ahead.hpp"
#include "numbers.hpp"

namespace {

#define UNROLLED _Pragma("GCC unroll 8")

constexpr int64_t FEW = 4;  // rows

// A number for each of the rows.
struct Each {
    float row[FEW];
    static Each of(Four x) { Each each; std::memcpy(each.row, &x, sizeof x); return each; }
    Four all() const { Four x; std::memcpy(&x, row, sizeof x); return x; }
};

// run(n) with the number of rows as a constant, at most FEW.
template <class Run>
inline auto with_rows(int64_t rows, const Run& run) {
    if (rows >= 4) return run(std::integral_constant<int, 4>());
    if (rows == 3) return run(std::integral_constant<int, 3>());
    if (rows == 2) return run(std::integral_constant<int, 2>());
    return run(std::integral_constant<int, 1>());
}

// Scores: level * scale * a + noise * a^2 + base, for the scales `a` as they are stored, rounded like those of the reference so that the same
// tokens are selected. `lanes` [ROWS][16] has the largest score of each lane, over all pages from the `first` on.
template <int V, int ROWS>
inline void score_rows(const int32_t* level, int64_t level_stride, const Each& scale, const uint8_t* a, const Each& noise, const Each& base, float* __restrict to, int64_t stride, bool first, float* __restrict lanes, const uint8_t* fetch) {
    Sixteen most[ROWS];
    UNROLLED for (int r = 0; r < ROWS; ++r) most[r] = load16(lanes + 16 * r);
    for (int i = 0; i < V; ++i) {
        const Sixteen size = load_halves(a + 32 * i), square = size * size;
        __builtin_prefetch(fetch + i * LINE_BYTES, 0, 2);
        Sixteen score[ROWS];
        UNROLLED for (int r = 0; r < ROWS; ++r) score[r] = __builtin_convertvector(load16(level + r * level_stride + 16 * i), Sixteen) * scale.row[r];
        UNROLLED for (int r = 0; r < ROWS; ++r) score[r] = score[r] * size + square * noise.row[r];
        UNROLLED for (int r = 0; r < ROWS; ++r) score[r] += base.row[r];
        UNROLLED for (int r = 0; r < ROWS; ++r) store16(to + r * stride + 16 * i, score[r]);
        UNROLLED for (int r = 0; r < ROWS; ++r) most[r] = i || !first ? larger(score[r], most[r]) : score[r];
    }
    UNROLLED for (int r = 0; r < ROWS; ++r) store16(lanes + 16 * r, most[r]);
}

struct Weighed {
    Each sum, most;
};

// Of levels, with scores as in score_rows but rounded less often and less their base's shift: p = 2^score, and the weights p * b with the scales `b` of
// values, which are stored. Returns the sums of p and the largest weights; `lanes` as in score_rows.
template <int V, int ROWS>
inline Weighed weigh_levels(const int32_t* level, int64_t level_stride, const Each& scale, const uint8_t* a, const Each& noise, const Each& base, const uint8_t* b, float* __restrict to, int64_t stride, bool first, float* __restrict lanes, const uint8_t* fetch) {
    Sixteen sum[FEW] = {}, most[FEW] = {}, peak[ROWS];
    Power power[ROWS];
    UNROLLED for (int r = 0; r < ROWS; ++r) peak[r] = first ? sixteen(-INFINITY) : load16(lanes + 16 * r);
    // A column's powers end while the next one's begin.
    auto step = [&](int i, auto begins, auto ends) __attribute__((always_inline)) {
        Sixteen size, weight, p[ROWS];
        if (begins) size = load_halves(a + 32 * i), __builtin_prefetch(fetch + i * LINE_BYTES, 0, 2);
        if (ends) weight = load_halves(b + 32 * (i - 1));
        UNROLLED for (int r = 0; r < ROWS; ++r) {
            if (ends) p[r] = power[r].end();
            if (begins) {
                const Sixteen x = fused(fused(__builtin_convertvector(load16(level + r * level_stride + 16 * i), Sixteen), sixteen(scale.row[r]), size * noise.row[r]), size, sixteen(base.row[r]));
                peak[r] = larger(x, peak[r]), power[r] = Power::begin(x);
            }
            if (ends) sum[r] += p[r], p[r] *= weight, most[r] = larger_size(p[r], most[r]), store16(to + r * stride + 16 * (i - 1), p[r]);
        }
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    step(0, yes, no);
    for (int i = 1; i < V; ++i) step(i, yes, yes);
    step(V, no, yes);
    UNROLLED for (int r = 0; r < ROWS; ++r) store16(lanes + 16 * r, peak[r]);
    return {Each::of(fold16(sum)), Each::of(most16(most))};
}

// p = 2^(x - shift); their sums.
template <int V, int ROWS>
inline Each soften_rows(const float* x, int64_t stride, const Each& shift, float* to, const uint8_t* fetch) {
    Sixteen sum[FEW] = {};
    Power power[ROWS];
    auto step = [&](int i, auto begins, auto ends) __attribute__((always_inline)) {
        if (begins) __builtin_prefetch(fetch + i * LINE_BYTES, 0, 2);
        UNROLLED for (int r = 0; r < ROWS; ++r) {
            Sixteen p;
            if (ends) p = power[r].end();
            if (begins) power[r] = Power::begin(load16(x + r * stride + 16 * i) - shift.row[r]);
            if (ends) sum[r] += p, store16(to + r * stride + 16 * (i - 1), p);
        }
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    step(0, yes, no);
    for (int i = 1; i < V; ++i) step(i, yes, yes);
    step(V, no, yes);
    return Each::of(fold16(sum));
}

// p -> weights p * b of the tokens that are not `taken`, a bit for each, by every row's own mask; the sums of their p, the largest weights.
template <int V, int ROWS>
inline Weighed weigh_rows(float* p, int64_t stride, const uint16_t* const (&taken)[FEW], const uint8_t* b, const uint8_t* fetch) {
    Sixteen sum[FEW] = {}, most[FEW] = {};
    for (int i = 0; i < V; ++i) {
        __builtin_prefetch(fetch + i * LINE_BYTES, 0, 2);
        const Sixteen size = load_halves(b + 32 * i);
        Sixteen weight[ROWS];
        UNROLLED for (int r = 0; r < ROWS; ++r) weight[r] = without(load16(p + r * stride + 16 * i), taken[r][i]);
        UNROLLED for (int r = 0; r < ROWS; ++r) sum[r] += weight[r];
        UNROLLED for (int r = 0; r < ROWS; ++r) weight[r] *= size;
        UNROLLED for (int r = 0; r < ROWS; ++r) most[r] = larger_size(weight[r], most[r]);
        UNROLLED for (int r = 0; r < ROWS; ++r) store16(p + r * stride + 16 * i, weight[r]);
    }
    return {Each::of(fold16(sum)), Each::of(most16(most))};
}

// What weights are multiplied by to become integers, from their largest. Below 2^-100 they cannot count beside the granule's largest weight,
// and the quotient would overflow.
template <class Numbers>
inline Numbers to_integers(Numbers most) { return most < 7.9e-31f ? Numbers{} : 127.0f / most; }

// Weights, not negative, with their largest -> integers 0..127 [rows][16 V]; their scales, max / 127.
template <int V>
inline Each quantize_rows(int64_t rows, const float* w, int64_t stride, const Each& most, int8_t* integers) {
    const Each factor = Each::of(to_integers(most.all()));  // not number by number: a register loaded from several stores waits for all of them
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
    return Each::of(most.all() / 127.0f);
}

}  // namespace
