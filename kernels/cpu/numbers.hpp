// Small numeric pieces that the compiler vectorises: half precision, 2^x, rounding, sums of a fixed order.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

inline int32_t bits_of(float x) { int32_t i; std::memcpy(&i, &x, 4); return i; }
inline float float_of(int32_t i) { float x; std::memcpy(&x, &i, 4); return x; }

// Half to float and back, round to nearest even. Encoding clamps to +-65504 first, so no infinities arise.
#ifdef __F16C__
inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float x) { return _cvtss_sh(x, 0); }
#else
inline float half_to_float(uint16_t h) {
    const int32_t sign = int32_t(uint32_t(h & 0x8000) << 16), magnitude = (h & 0x7fff) << 13;
    if ((h & 0x7c00) == 0) return float_of(bits_of(float_of(magnitude + (113 << 23)) - float_of(113 << 23)) | sign);  // subnormal
    return float_of((magnitude + ((h & 0x7c00) == 0x7c00 ? (224 << 23) : (112 << 23))) | sign);
}
inline uint16_t float_to_half(float x) {
    const int32_t all = bits_of(x), sign = (all >> 16) & 0x8000, magnitude = all & 0x7fffffff;
    if (magnitude < (113 << 23)) return sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));  // subnormal: the addition rounds
    if (magnitude >= (143 << 23)) return sign | (magnitude > (255 << 23) ? 0x7e00 : 0x7c00);
    return sign | ((magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13);
}
#endif
inline void halves_to_floats(const uint8_t* from, int64_t n, float* to) {  // `from` need not be aligned
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + 2 * i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 2 * i))));
#endif
    for (; i < n; ++i) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        to[i] = half_to_float(half);
    }
}
inline float clamp_half(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer, half to even
inline int32_t round_int(float x) { return bits_of(x + ROUNDER) - bits_of(ROUNDER); }

// 2^x for x <= 0 (and small positive x); 0 below -126.5. Error below 2 ulp: the polynomial of degree 5 with the least relative error
// on [-1/2, 1/2] that is exact at 0. NaN stays NaN. The sum with ROUNDER has the exponent in its lowest bits.
inline float exp2_fast(float x) {
    const float y = x < -127.0f ? -127.0f : x;
    const float shifted = y + ROUNDER;
    const float f = y - (shifted - ROUNDER);
    float p = 1.3264727e-3f;
    p = p * f + 9.6715130e-3f;
    p = p * f + 5.5507336e-2f;
    p = p * f + 2.4022242e-1f;
    p = p * f + 6.9314700e-1f;
    p = p * f + 1.0f;
    return p * float_of(int32_t((uint32_t(bits_of(shifted)) << 23) + (127u << 23)));
}

// Sixteen at a time: the compiler splits them where registers are narrower.
typedef float Sixteen __attribute__((vector_size(64)));
typedef int32_t SixteenInts __attribute__((vector_size(64)));
typedef uint32_t SixteenBits __attribute__((vector_size(64)));  // whose sums wrap

inline Sixteen load16(const float* from) { Sixteen x; std::memcpy(&x, from, sizeof x); return x; }
inline SixteenInts load16(const int32_t* from) { SixteenInts x; std::memcpy(&x, from, sizeof x); return x; }
inline Sixteen load_halves(const uint8_t* from) {  // sixteen, which need not be aligned
#ifdef __AVX512F__
    return (Sixteen)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    Sixteen x;
    halves_to_floats(from, 16, reinterpret_cast<float*>(&x));
    return x;
#endif
}
// The first n < 16 numbers, `rest` in the other lanes. (Indexing a vector by a variable would keep it in memory.)
inline Sixteen load_part(const float* from, int64_t n, float rest) {
    float lane[16];
    for (int j = 0; j < 16; ++j) lane[j] = j < n ? from[j] : rest;
    return load16(lane);
}
// The first n, `rest` in the other lanes.
inline Sixteen first_of(Sixteen x, int64_t n, float rest) {
    const SixteenInts lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return lane < int32_t(n) ? x : Sixteen{} + rest;
}
inline Sixteen sixteen(float x) { return x - Sixteen{}; }  // of which nothing is left but a broadcast; x + 0 is not -0 where x is
inline void store16(float* to, Sixteen x) { std::memcpy(to, &x, sizeof x); }
inline void store16(int32_t* to, SixteenInts x) { std::memcpy(to, &x, sizeof x); }
inline Sixteen larger(Sixteen a, Sixteen b) {  // b if either is NaN
#ifdef __AVX512F__
    return (Sixteen)_mm512_max_ps((__m512)a, (__m512)b);  // the compiler does not always see it
#else
    return a > b ? a : b;
#endif
}

inline Sixteen exp2_fast(Sixteen x) {
    const Sixteen zero = {}, y = larger(zero - 127.0f, x), shifted = y + ROUNDER, f = y - (shifted - ROUNDER);
    Sixteen p = zero + 1.3264727e-3f;
    p = p * f + 9.6715130e-3f;
    p = p * f + 5.5507336e-2f;
    p = p * f + 2.4022242e-1f;
    p = p * f + 6.9314700e-1f;
    p = p * f + 1.0f;
    return p * (Sixteen)(((SixteenBits)shifted << 23) + (127u << 23));
}

// a b + c, rounded once where the instruction set's registers allow it. Not for what has to be the same everywhere.
inline Sixteen fused(Sixteen a, Sixteen b, Sixteen c) {
#ifdef __AVX512F__
    return (Sixteen)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

// Of numbers that are not negative, whose bits are in their order: integers are compared by any of the core's pipes.
inline Sixteen larger_size(Sixteen a, Sixteen b) { return (Sixteen)((SixteenInts)a > (SixteenInts)b ? (SixteenInts)a : (SixteenInts)b); }

// Entries of a table of sixteen.
inline Sixteen pick(Sixteen table, SixteenInts index) {
#ifdef __AVX512F__
    return (Sixteen)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#else
    Sixteen x;
    for (int i = 0; i < 16; ++i) x[i] = table[index[i]];
    return x;
#endif
}

// 2^x in two steps, between which something else can be done: a register alone waits for each operation. For x below 2^46 in size and
// no more than 64; 2^-99 is the least.
struct Power {
    Sixteen rounded, rest;
#ifdef __AVX512F__
    // x rounded to sixteenths, whose power is an entry of a table, and what is left, f: 1 + a f + b f^2 has the least relative error, 4.3e-7, of those
    // that are exact at 0. The sum with the rounder has the sixteenths in its lowest bits; shifted, they add the exponent, and the entries are less
    // by what the fraction adds to that.
    static constexpr float ROUNDED = 786432.0f;  // 1.5 * 2^19

    Sixteen end() const {
        static const SixteenBits entries = {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
        const SixteenBits kept = (SixteenBits)larger_size(rounded, sixteen(ROUNDED - 99.0f));
        const Sixteen p = fused(fused(rest, sixteen(2.40226430e-1f), sixteen(6.93187721e-1f)), rest, sixteen(1.0f));
        return (Sixteen)((SixteenBits)pick((Sixteen)entries, (SixteenInts)kept) + (kept << 19)) * p;
    }
#else
    // As exp2_fast; where a table costs more than three terms.
    static constexpr float ROUNDED = ROUNDER;

    Sixteen end() const {
        Sixteen p = fused(sixteen(1.3264727e-3f), rest, sixteen(9.6715130e-3f));
        p = fused(fused(p, rest, sixteen(5.5507336e-2f)), rest, sixteen(2.4022242e-1f));
        p = fused(fused(p, rest, sixteen(6.9314700e-1f)), rest, sixteen(1.0f));
        return (Sixteen)((SixteenBits)p + ((SixteenBits)larger_size(rounded, sixteen(ROUNDED - 99.0f)) << 23));  // p > 0: the exponent is added
    }
#endif

    static Power begin(Sixteen x) {
        const Sixteen rounded = x + ROUNDED;
        return {rounded, x - (rounded - ROUNDED)};
    }
};

typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
inline Four load4(const float* from) { Four x; std::memcpy(&x, from, sizeof x); return x; }
inline void store4(float* to, Four x) { std::memcpy(to, &x, sizeof x); }

// The fold of sixteen: the second half is added to the first.
inline float fold16(Sixteen x) {
    const Eight a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    const Four b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

inline int32_t sum16(SixteenInts x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += x[i];
    return sum;
#endif
}

// x, and 0 in the lanes whose bit of `mask` is set.
inline Sixteen without(Sixteen x, uint16_t mask) {
#ifdef __AVX512F__
    return (Sixteen)_mm512_maskz_mov_ps(__mmask16(~mask), (__m512)x);
#else
    const SixteenInts bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    return ((int32_t(mask) & bit) == 0) ? x : Sixteen{};
#endif
}

// The folds of four.
template <class Two>
inline Four fold_four(const Sixteen x[4], const Two& two) {
    Four y[4];
    for (int i = 0; i < 4; ++i) {
        const Eight a = two(__builtin_shufflevector(x[i], x[i], 0, 1, 2, 3, 4, 5, 6, 7), __builtin_shufflevector(x[i], x[i], 8, 9, 10, 11, 12, 13, 14, 15));
        y[i] = two(__builtin_shufflevector(a, a, 0, 1, 2, 3), __builtin_shufflevector(a, a, 4, 5, 6, 7));
    }
    const Four a = two(__builtin_shufflevector(y[0], y[1], 0, 4, 1, 5), __builtin_shufflevector(y[0], y[1], 2, 6, 3, 7));
    const Four b = two(__builtin_shufflevector(y[2], y[3], 0, 4, 1, 5), __builtin_shufflevector(y[2], y[3], 2, 6, 3, 7));
    return two(__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7));
}
inline Four fold16(const Sixteen x[4]) {
    return fold_four(x, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
inline Four most16(const Sixteen x[4]) {
    return fold_four(x, [](auto a, auto b) __attribute__((always_inline)) { return b > a ? b : a; });
}

// Sixteen interleaved running sums, then a fold: one order for every instruction set and thread count.
inline float sum16(const float* x, int64_t n) {
    Sixteen sum = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) sum += load16(x + i);
    return fold16(i == n ? sum : sum + load_part(x + i, n - i, 0.0f));
}

// The largest of sixteen; NaN where the last compared is NaN.
inline float most16(Sixteen x) {
    const Eight a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), b = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15), c = b > a ? b : a;
    const Four d = __builtin_shufflevector(c, c, 0, 1, 2, 3), e = __builtin_shufflevector(c, c, 4, 5, 6, 7), f = e > d ? e : d;
    const float g = f[2] > f[0] ? f[2] : f[0], h = f[3] > f[1] ? f[3] : f[1];
    return h > g ? h : g;
}

inline float max16(const float* x, int64_t n) {
    Sixteen most = Sixteen{} - INFINITY;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) most = larger(load16(x + i), most);
    if (i < n) most = larger(load_part(x + i, n - i, -INFINITY), most);
    return most16(most);
}

// p = 2^(x - shift) for n numbers, a multiple of 16; returns their sum16.
inline float exp2_shifted(const float* __restrict x, float shift, int64_t n, float* __restrict p) {
    Sixteen sum = {};
    for (int64_t i = 0; i < n; i += 16) {
        const Sixteen y = exp2_fast(load16(x + i) - shift);
        store16(p + i, y);
        sum += y;
    }
    return fold16(sum);
}

// The sum of the last dim of kernels/reference/sums.py: the second half is added to the first, zero-padded to a power of two.
inline float fold_sum(float* x, int64_t n) {
    int64_t size = 1;
    while (size < n) size *= 2;
    while (size > 1) {
        if (size == 16 && n == 16) return fold16(load16(x));
        size /= 2;
        const int64_t pairs = n - size < size ? n - size : size;
        for (int64_t i = 0; i < pairs; ++i) x[i] += x[i + size];
        n = size < n ? size : n;
    }
    return x[0];
}

// A product of 16 COUNT numbers, COUNT a power of two, whose fold16 is then the fold_sum of the product.
template <int COUNT>
inline Sixteen product_of(const float* a, const Sixteen (&b)[COUNT]) {
    Sixteen x[COUNT];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) x[i] = load16(a + 16 * i) * b[i];
#pragma GCC unroll 4
    for (int half = COUNT / 2; half; half /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
}

// The lowest bytes of sixteen integers.
inline void store_bytes(int8_t* to, SixteenInts x) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int i = 0; i < 16; ++i) to[i] = int8_t(x[i]);
#endif
}

}  // namespace
