// Words of calibrated codebooks: eight channels, as int16, for ten bits or so. Where they lie in their book, and sixteen of them as numbers.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

#include "interface.hpp"
#include "numbers.hpp"

namespace {

constexpr int64_t WORD = 8;  // channels
constexpr int WORD_BYTES_LOG2 = 4;

// All lanes alike. (x + zero vector would keep an addition, since -0 + 0 is 0.)
inline Sixteen all_lanes(float x) { return Sixteen{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// Where the words of a page's tokens begin in their book, in bytes: codes [groups][bits][P/8] -> at[g * stride + token]. BITS: of an index, or
// 0 for those given.
template <int BITS>
inline void read_places(const uint8_t* codes, int64_t groups, int64_t given, int64_t tokens, uint16_t* at, int64_t stride) {
    const int64_t bits = BITS ? BITS : given;
    const int64_t plane_bytes = tokens / 8;
    for (int64_t g = 0; g < groups; ++g, codes += bits * plane_bytes, at += stride) {
#if defined(__AVX512BW__)
        for (int64_t t = 0; t < tokens; t += 64) {
            __m512i low = _mm512_setzero_si512(), high = low;
#pragma GCC unroll 10
            for (int64_t bit = 0; bit < bits; ++bit) {
                uint64_t mask;
                std::memcpy(&mask, codes + bit * plane_bytes + t / 8, 8);
                const __m512i one = _mm512_set1_epi16(short(1 << (bit + WORD_BYTES_LOG2)));
                low = _mm512_mask_add_epi16(low, __mmask32(mask), low, one), high = _mm512_mask_add_epi16(high, __mmask32(mask >> 32), high, one);
            }
            _mm512_storeu_si512(at + t, low), _mm512_storeu_si512(at + t + 32, high);
        }
#else
        typedef uint16_t Shorts __attribute__((vector_size(16)));
        const auto alike = [](uint16_t x) { return Shorts{x, x, x, x, x, x, x, x}; };
        const Shorts of_token = {1, 2, 4, 8, 16, 32, 64, 128};
        for (int64_t byte = 0; byte < plane_bytes; ++byte) {
            Shorts place = {};
            for (int64_t bit = 0; bit < bits; ++bit) {
                const Shorts set = (Shorts)((of_token & alike(codes[bit * plane_bytes + byte])) != 0);
                place |= set & alike(uint16_t(1 << (bit + WORD_BYTES_LOG2)));
            }
            std::memcpy(at + 8 * byte, &place, 16);
        }
#endif
    }
}

// Sixteen words of one book: pair[i] has channels 2i (low half) and 2i + 1 (high half) of all of them.
inline void load_words(const uint8_t* book, const uint16_t* at, SixteenInts (&pair)[4]) {
#if defined(__AVX512BW__)
    __m512i row[4];  // words r, 4 + r, 8 + r, 12 + r
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
        const auto word = [&](int i) __attribute__((always_inline)) { return _mm_loadu_si128((const __m128i*)(book + at[i])); };
        const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(word(r)), word(4 + r), 1);
        const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(word(8 + r)), word(12 + r), 1);
        row[r] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    const __m512i a = _mm512_unpacklo_epi32(row[0], row[1]), b = _mm512_unpacklo_epi32(row[2], row[3]);
    const __m512i c = _mm512_unpackhi_epi32(row[0], row[1]), d = _mm512_unpackhi_epi32(row[2], row[3]);
    pair[0] = (SixteenInts)_mm512_unpacklo_epi64(a, b), pair[1] = (SixteenInts)_mm512_unpackhi_epi64(a, b);
    pair[2] = (SixteenInts)_mm512_unpacklo_epi64(c, d), pair[3] = (SixteenInts)_mm512_unpackhi_epi64(c, d);
#else
    typedef int32_t FourInts __attribute__((vector_size(16)));
    FourInts found[4][4];
    for (int lane = 0; lane < 4; ++lane) {
        FourInts row[4];
        for (int r = 0; r < 4; ++r) std::memcpy(&row[r], book + at[4 * lane + r], 16);
        const FourInts a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5), b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
        const FourInts c = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7), d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
        found[0][lane] = __builtin_shufflevector(a, b, 0, 1, 4, 5), found[1][lane] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
        found[2][lane] = __builtin_shufflevector(c, d, 0, 1, 4, 5), found[3][lane] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
    }
    std::memcpy(pair, found, sizeof found);
#endif
}

inline Sixteen low_half(SixteenInts pair) {
#if defined(__AVX512BW__)
    return (Sixteen)_mm512_cvtepi32_ps(_mm512_madd_epi16((__m512i)pair, _mm512_set1_epi32(1)));
#else
    return __builtin_convertvector((SixteenInts)((SixteenBits)pair << 16) >> 16, Sixteen);
#endif
}

inline Sixteen high_half(SixteenInts pair) { return __builtin_convertvector(pair >> 16, Sixteen); }

// One word of each of two books, side by side.
inline Sixteen two_words(const uint8_t* first, const uint8_t* second) {
#if defined(__AVX512BW__)
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)first)), _mm_loadu_si128((const __m128i*)second), 1);
    return (Sixteen)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(both));
#else
    typedef int16_t Shorts __attribute__((vector_size(32)));
    Shorts both;
    std::memcpy(&both, first, 16), std::memcpy(reinterpret_cast<uint8_t*>(&both) + 16, second, 16);
    return __builtin_convertvector(__builtin_convertvector(both, SixteenInts), Sixteen);
#endif
}

}  // namespace
