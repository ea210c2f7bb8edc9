// One query row and one page of 16 V tokens, in registers: scores, their softmax, integer weights.
#pragma once
#include <cmath>
#include <cstdint>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "numbers.hpp"

namespace {

#define UNROLLED _Pragma("GCC unroll 8")
#define IN_REGISTERS inline __attribute__((always_inline))

// x op= the other half, until one is left: one order for every instruction set.
template <int V, class Two>
IN_REGISTERS Sixteen halve(const Sixteen x[V], const Two& two) {
    Sixteen left[V];
    UNROLLED for (int i = 0; i < V; ++i) left[i] = x[i];
    UNROLLED for (int n = V / 2; n; n /= 2)
        UNROLLED for (int i = 0; i < n; ++i) left[i] = two(left[i], left[i + n]);
    return left[0];
}
template <int V>
IN_REGISTERS float largest_of(const Sixteen x[V]) {
    return most16(halve<V>(x, [](Sixteen a, Sixteen b) __attribute__((always_inline)) { return larger(a, b); }));
}
template <int V>
IN_REGISTERS float sum_of(const Sixteen x[V]) {
    return fold16(halve<V>(x, [](Sixteen a, Sixteen b) __attribute__((always_inline)) { return a + b; }));
}

// Scores without q.c: level * scale * a + noise * a^2, for scales `a` and their squares.
template <int V>
IN_REGISTERS void score_row(const int32_t* level, float scale, const float* a, float noise, const float* squares, Sixteen x[V]) {
    UNROLLED for (int i = 0; i < V; ++i)
        x[i] = __builtin_convertvector(load16(level + 16 * i), Sixteen) * scale * load16(a + 16 * i) + noise * load16(squares + 16 * i);
}

// x = 2^(x - shift); returns their sum.
template <int V>
IN_REGISTERS float soften_row(Sixteen x[V], float shift) {
    UNROLLED for (int i = 0; i < V; ++i) x[i] = exp2_fast(x[i] - shift);
    return sum_of<V>(x);
}

// Weights, not negative -> integers 0..127; returns their scale, max / 127. Below 2^-100 a page cannot count beside the granule's largest
// weight, and the quotient would overflow.
template <int V>
IN_REGISTERS float quantize_row(const Sixteen w[V], int8_t* integers) {
    const float peak = largest_of<V>(w), factor = peak < 7.9e-31f ? 0.0f : 127.0f / peak;
#ifdef __AVX512F__
    if (V % 4 == 0) {
        UNROLLED for (int i = 0; i < V; i += 4) {
            __m512i n[4];
            UNROLLED for (int j = 0; j < 4; ++j) n[j] = _mm512_cvtps_epi32((__m512)(w[i + j] * factor));
            const __m512i four = _mm512_packus_epi16(_mm512_packus_epi32(n[0], n[1]), _mm512_packus_epi32(n[2], n[3]));
            _mm512_storeu_si512(integers + 16 * i, _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), four));
        }
        return peak / 127.0f;
    }
#endif
    UNROLLED for (int i = 0; i < V; ++i) store_bytes(integers + 16 * i, (SixteenInts)(w[i] * factor + ROUNDER));
    return peak / 127.0f;
}

// The integers of weights p * a.
template <int V>
IN_REGISTERS float weigh_row(const Sixteen p[V], const float* a, int8_t* integers) {
    Sixteen w[V];
    UNROLLED for (int i = 0; i < V; ++i) w[i] = p[i] * load16(a + 16 * i);
    return quantize_row<V>(w, integers);
}

}  // namespace
