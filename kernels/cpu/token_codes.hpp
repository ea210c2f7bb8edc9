// Whole codes of single tokens, for those few that refinement picks. A token's bits are gathered as rows of D / 8 bytes, one per plane,
// the most significant first, dim d in bit d % 8 of byte d / 8: its scanned bits come out of the interleaved words of its page, its low
// bits are stored like that.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

#include "interface.hpp"

namespace {

using namespace bitkv;

// Values: the scanned bits of a token, one plane (words [P/4][D/8]).
inline void value_bits(const uint8_t* words, int64_t dim, int64_t token, uint8_t* row) {
    const int64_t width = dim / 8, shift = token % 4 * 8;
    words += token / 4 * 4 * width;
#if defined(__AVX512VBMI__)
    if (width % 8 == 0) {
        for (int64_t at = 0; at < width; at += 16) {
            const __mmask16 inside = width - at >= 16 ? 0xffff : 0xff;
            const __m512i word = _mm512_maskz_loadu_epi32(inside, words + 4 * at);
            for (int j = 0; j < 8; ++j) {
                const uint16_t bits = _mm512_test_epi32_mask(word, _mm512_set1_epi32(1 << (shift + j)));
                std::memcpy(row + (j * width + at) / 8, &bits, inside == 0xff ? 1 : 2);
            }
        }
        return;
    }
#endif
    std::memset(row, 0, size_t(width));
    for (int64_t d = 0; d < dim; ++d) row[d / 8] |= uint8_t(((words[4 * (d % width) + shift / 8] >> (d / width)) & 1) << (d % 8));
}

#if defined(__AVX512VBMI__)

#define UNROLL _Pragma("GCC unroll 8")

// The codes of 64 dims (fewer at the end: zeros) that `planes` rows of bits stand for, the rows dim / 8 bytes apart.
inline __m512i expand(const uint8_t* bits, int64_t planes, int64_t dim, int64_t first) {
    const int64_t bytes = (dim - first) / 8;
    __m512i code = _mm512_setzero_si512();
    bits += first / 8;
    for (int64_t p = 0; p < planes; ++p, bits += dim / 8) {
        uint64_t mask = 0;
        if (bytes >= 8) std::memcpy(&mask, bits, 8);
        else for (int64_t i = 0; i < bytes; ++i) mask |= uint64_t(bits[i]) << (8 * i);
        code = _mm512_add_epi8(code, code);
        code = _mm512_mask_add_epi8(code, mask, code, _mm512_set1_epi8(1));
    }
    return code;
}

// Sums of the lanes of four registers.
inline __m128i sum_lanes(const __m512i x[4]) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}

// out[r][i] = sum over d of operands[r][d] times the code of token i, whose rows of bits stand at bits[i].
inline void token_dots(const uint8_t* const* bits, int64_t count, int64_t planes, int64_t dim, const int8_t* operands, int64_t rows, int32_t* out) {
    for (int64_t row = 0; row < rows; row += 4, operands += 4 * dim, out += 4 * count) {
        const int64_t beside = rows - row < 4 ? rows - row : 4;
        for (int64_t i = 0; i < count; ++i) {
            __m512i sum[4] = {};
            for (int64_t d = 0; d < dim; d += 64) {
                const __mmask64 inside = dim - d >= 64 ? ~0ull : (1ull << (dim - d)) - 1;
                const __m512i code = expand(bits[i], planes, dim, d);
                UNROLL for (int64_t r = 0; r < 4; ++r)
                    sum[r] = _mm512_dpbusd_epi32(sum[r], code, _mm512_maskz_loadu_epi8(r < beside ? inside : 0, operands + r * dim + d));
            }
            alignas(16) int32_t found[4];
            _mm_store_si128((__m128i*)found, sum_lanes(sum));
            for (int64_t r = 0; r < beside; ++r) out[r * count + i] = found[r];
        }
    }
}

// out[r][d] = sum over tokens of weights[r][i] (0..127) times the code of token i, bits [tokens][planes][D / 8]. There are weights for a
// multiple of four tokens, 0 past the last.
inline void token_sums(const uint8_t* bits, int64_t count, int64_t planes, int64_t dim, const int8_t* weights, int64_t stride, int64_t rows, int32_t* out) {
    // Lanes of 16 bytes hold dims 0..3 of their sixteen last, so that dwords come out in order when bytes of four tokens are woven.
    const __m512i weave = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    for (int64_t row = 0; row < rows; row += 4, weights += 4 * stride, out += 4 * dim) {
        const int64_t beside = rows - row < 4 ? rows - row : 4;
        for (int64_t d = 0; d < dim; d += 64) {
            __m512i sum[4][4] = {};
            for (int64_t i = 0; i < count; i += 4) {
                __m512i code[4];
                UNROLL for (int64_t b = 0; b < 4; ++b)
                    code[b] = i + b < count ? _mm512_permutexvar_epi32(weave, expand(bits + (i + b) * planes * (dim / 8), planes, dim, d)) : _mm512_setzero_si512();
                const __m512i low01 = _mm512_unpacklo_epi8(code[0], code[1]), high01 = _mm512_unpackhi_epi8(code[0], code[1]);
                const __m512i low23 = _mm512_unpacklo_epi8(code[2], code[3]), high23 = _mm512_unpackhi_epi8(code[2], code[3]);
                const __m512i four[4] = {_mm512_unpacklo_epi16(low01, low23), _mm512_unpackhi_epi16(low01, low23), _mm512_unpacklo_epi16(high01, high23), _mm512_unpackhi_epi16(high01, high23)};
                UNROLL for (int64_t r = 0; r < 4; ++r) {
                    int32_t weight = 0;
                    if (r < beside) std::memcpy(&weight, weights + r * stride + i, 4);
                    UNROLL for (int v = 0; v < 4; ++v) sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], four[v], _mm512_set1_epi32(weight));
                }
            }
            UNROLL for (int64_t r = 0; r < 4; ++r)
                UNROLL for (int v = 0; v < 4; ++v) {
                    const int64_t left = dim - d - 16 * v;
                    const __mmask16 inside = r >= beside || left <= 0 ? 0 : left >= 16 ? 0xffff : (1u << left) - 1;
                    _mm512_mask_storeu_epi32(out + r * dim + d + 16 * v, inside, sum[r][v]);
                }
        }
    }
}

#else

inline int32_t code_at(const uint8_t* bits, int64_t planes, int64_t dim, int64_t d) {
    int32_t code = 0;
    for (int64_t p = 0; p < planes; ++p) code = 2 * code + ((bits[p * (dim / 8) + d / 8] >> (d % 8)) & 1);
    return code;
}

inline void token_dots(const uint8_t* const* bits, int64_t count, int64_t planes, int64_t dim, const int8_t* operands, int64_t rows, int32_t* out) {
    std::memset(out, 0, size_t(rows * count) * sizeof(int32_t));
    for (int64_t i = 0; i < count; ++i)
        for (int64_t d = 0; d < dim; ++d) {
            const int32_t code = code_at(bits[i], planes, dim, d);
            for (int64_t r = 0; r < rows; ++r) out[r * count + i] += code * operands[r * dim + d];
        }
}

inline void token_sums(const uint8_t* bits, int64_t count, int64_t planes, int64_t dim, const int8_t* weights, int64_t stride, int64_t rows, int32_t* out) {
    std::memset(out, 0, size_t(rows * dim) * sizeof(int32_t));
    for (int64_t i = 0; i < count; ++i, bits += planes * (dim / 8))
        for (int64_t d = 0; d < dim; ++d) {
            const int32_t code = code_at(bits, planes, dim, d);
            for (int64_t r = 0; r < rows; ++r) out[r * dim + d] += code * weights[r * stride + i];
        }
}

#endif

}  // namespace
