// Matrix times vector for decode steps: weights are read once where they lie, in float32 or bfloat16, and everything is summed in
// float32 in one order for every instruction set, number of threads and number of rows.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "interface.hpp"
#include "numbers.hpp"

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int SUMS = 64;  // running sums of a dot product, as many registers as it takes
typedef float Lanes __attribute__((vector_size(4 * WIDTH)));

inline Lanes lanes_of(const float* from) {
    Lanes found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

inline Lanes lanes_of(const uint16_t* from) {  // bfloat16: the upper half of a float
#if defined(__AVX512F__)
    return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
    return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
    Lanes found;
    for (int i = 0; i < WIDTH; ++i) found[i] = float_of(int32_t(uint32_t(from[i]) << 16));
    return found;
#endif
}

// Element i goes to running sum i % 64; then 0 .. 15 and 32 .. 47 are added, 16 .. 31 and 48 .. 63, these two, and fold16.
template <class Weight>
inline float dot(const Weight* w, const float* x, int64_t n) {
    Lanes sum[SUMS / WIDTH] = {};
    int64_t i = 0;
    for (; i + SUMS <= n; i += SUMS)
        for (int b = 0; b < SUMS / WIDTH; ++b) sum[b] += lanes_of(w + i + b * WIDTH) * lanes_of(x + i + b * WIDTH);
    if (i < n) {
        Weight some[SUMS] = {};
        float others[SUMS] = {};
        std::memcpy(some, w + i, (n - i) * sizeof(Weight));
        std::memcpy(others, x + i, (n - i) * sizeof(float));
        for (int b = 0; b < SUMS / WIDTH; ++b) sum[b] += lanes_of(some + b * WIDTH) * lanes_of(others + b * WIDTH);
    }
    float single[SUMS], folded[16];
    std::memcpy(single, sum, sizeof single);
    for (int j = 0; j < 16; ++j) folded[j] = (single[j] + single[j + 32]) + (single[j + 16] + single[j + 48]);
    return fold16(load16(folded));
}

template <class Weight>
inline void linear_of(const bitkv::Matrix& m, int64_t first, int64_t last, const float* x, int64_t rows, float* y) {
    for (int64_t o = first; o < last; ++o) {
        const Weight* w = (const Weight*)m.data + o * m.in;
        const float bias = m.bias ? m.bias[o] : 0.0f;
        for (int64_t r = 0; r < rows; ++r) y[r * m.out + o] = dot(w, x + r * m.in, m.in) + bias;
    }
}

inline void linear(const bitkv::Matrix& m, int64_t first, int64_t last, const float* x, int64_t rows, float* y) {
    m.bfloat16 ? linear_of<uint16_t>(m, first, last, x, rows, y) : linear_of<float>(m, first, last, x, rows, y);
}

inline void widen(int64_t n, const uint16_t* x, float* y) {
    for (int64_t i = 0; i < n; ++i) y[i] = float_of(int32_t(uint32_t(x[i]) << 16));
}

// To bfloat16, half to even; NaN stays NaN.
inline void narrow(int64_t n, const float* x, uint16_t* y) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = uint32_t(bits_of(x[i])), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        y[i] = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
    }
}

// y = x / sqrt(mean of x^2 + eps) * weight; y may be x.
inline void rms_norm(int64_t n, float eps, const float* x, const float* weight, float* y) {
    const float scale = 1.0f / std::sqrt(dot(x, x, n) / float(n) + eps);
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

// Rotary position embedding of one head in place: pairs (i, i + n / 2) of its first n dims turn by the angle of (cos, sin) [n].
inline void rotary(int64_t n, const float* cosine, const float* sine, float* x) {
    const int64_t half = n / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

// gate = silu(gate) * up, silu(g) = g / (1 + e^-g)
inline void gated(int64_t n, float* gate, const float* up) {
    for (int64_t i = 0; i < n; ++i) {
        const float g = gate[i], e = exp2_fast((g < 0 ? g : -g) * 1.44269504f);
        gate[i] = g * ((g < 0 ? e : 1.0f) / (1.0f + e)) * up[i];
    }
}

}  // namespace
