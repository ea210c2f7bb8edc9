// Codes of single tokens as bytes, for those few that refinement picks: the top bits come out of the interleaved words of their page, the
// low bits are stored as rows of D / 8 bytes, one per plane, the most significant first, dim d in bit d % 8 of byte d / 8.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

#include "ahead.hpp"
#include "interface.hpp"
#include "level_dot.hpp"

namespace {

using namespace bitkv;

// Bytes from one token's codes to the next: whole registers, zeros past the last dim.
inline int64_t code_stride(int64_t dim) { return (dim + 63) / 64 * 64; }

#if defined(__AVX512VBMI__)

template <int PLANES>
inline void read_planes(const uint8_t* bits, int64_t dim, uint8_t* codes) {
    for (int64_t d = 0; d < dim; d += 64, bits += 8) {
        __m512i code = _mm512_setzero_si512();
        UNROLL for (int p = 0; p < PLANES; ++p) {
            uint64_t mask = 0;
            if (dim - d >= 64) std::memcpy(&mask, bits + p * (dim / 8), 8);
            else std::memcpy(&mask, bits + p * (dim / 8), size_t(dim - d) / 8);
            code = _mm512_mask_add_epi8(code, mask, code, _mm512_set1_epi8(char(1 << (PLANES - 1 - p))));
        }
        _mm512_storeu_si512(codes + d, code);
    }
}

inline void read_row(const uint8_t* bits, int64_t planes, int64_t dim, uint8_t* codes) {
    switch (planes) {
        case 1: return read_planes<1>(bits, dim, codes);
        case 2: return read_planes<2>(bits, dim, codes);
        case 3: return read_planes<3>(bits, dim, codes);
        case 4: return read_planes<4>(bits, dim, codes);
        case 5: return read_planes<5>(bits, dim, codes);
        case 6: return read_planes<6>(bits, dim, codes);
        default: return read_planes<7>(bits, dim, codes);
    }
}

// Planes of up to 64 bytes in all, for a dim of 64 or 128: eight bits of each plane are rows of a matrix of 8 x 8 bits, and the codes of
// eight dims its columns. A product with single bits picks them. Up to 64 bytes around a token's are read: a record has centroids behind
// its low bits, and planes before them.
template <int DIM, class At>
inline void read_columns(int64_t count, const At& at, int64_t planes, uint8_t* codes) {
    const __m512i row = _mm512_set1_epi64(0x0706050403020100), octet = _mm512_set_epi64(7 * ONES, 6 * ONES, 5 * ONES, 4 * ONES, 3 * ONES, 2 * ONES, ONES, 0);
    const __mmask64 used = 0x0101010101010101u * uint8_t(0xff00 >> planes);  // the last row is the lowest bit
    const __m512i plane = _mm512_maskz_sub_epi8(used, row, _mm512_set1_epi8(char(8 - planes)));
    const __m512i from = _mm512_add_epi8(octet, _mm512_slli_epi16(plane, DIM == 128 ? 4 : 3)), column = _mm512_set1_epi64(int64_t(0x8040201008040201));
    const int64_t bytes = planes * DIM / 8;
    for (int64_t i = 0; i < count; ++i) {
        // A register from the token's first byte on would often touch a line more, which nobody has asked for, masked or not.
        const uint8_t* first = at(i);
        const int64_t into = int64_t(uintptr_t(first) % LINE_BYTES), back = into + bytes <= LINE_BYTES ? into : 0;
        const __m512i bits = _mm512_loadu_si512(first - back), place = _mm512_add_epi8(from, _mm512_set1_epi8(char(back)));
        UNROLL for (int d = 0; d < DIM; d += 64)
            _mm512_storeu_si512(codes + i * DIM + d, _mm512_gf2p8affine_epi64_epi8(column, _mm512_maskz_permutexvar_epi8(used, _mm512_add_epi8(place, _mm512_set1_epi8(char(d / 8))), bits), 0));
    }
}

// codes[i][d] = the number that `planes` rows of bits stand for, which begin at at(i).
template <class At>
inline void read_low(int64_t count, const At& at, int64_t planes, int64_t dim, uint8_t* codes) {
    if (dim == 64) return read_columns<64>(count, at, planes, codes);
    if (dim == 128 && planes <= 4) return read_columns<128>(count, at, planes, codes);
    for (int64_t i = 0; i < count; ++i) read_row(at(i), planes, dim, codes + i * code_stride(dim));
}

// add_bits for a dim of 64 or 128: a token's bits stand in one line.
inline void add_bits_of_line(const uint8_t* words, int64_t dim, int64_t token, int one, uint8_t* codes) {
    const __m512i lane = _mm512_set_epi64(0x3f3e3d3c3b3a3938, 0x3736353433323130, 0x2f2e2d2c2b2a2928, 0x2726252423222120, 0x1f1e1d1c1b1a1918, 0x1716151413121110, 0x0f0e0d0c0b0a0908, 0x0706050403020100);
    const __m512i place = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi32(lane, 2), _mm512_set1_epi8(0x3c)), _mm512_set1_epi8(char(token % 4)));
    const uint8_t* line = words + token / 4 * (dim / 2);
    if (dim == 64) {  // eight words: the byte of lane i is that of dims i % 8 + 8 j, of which this lane has j = i / 8
        const __m512i bytes = _mm512_permutexvar_epi8(place, _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)line)));
        const __mmask64 bits = _mm512_test_epi8_mask(bytes, _mm512_set_epi64(int64_t(128u * uint64_t(ONES)), 64 * ONES, 32 * ONES, 16 * ONES, 8 * ONES, 4 * ONES, 2 * ONES, ONES));
        const __m512i code = _mm512_loadu_si512(codes);
        _mm512_storeu_si512(codes, _mm512_mask_add_epi8(code, bits, code, _mm512_set1_epi8(char(one))));
        return;
    }
    const __m512i bytes = _mm512_permutexvar_epi8(place, _mm512_loadu_si512(line));  // sixteen words, four j to a register
    UNROLL for (int half = 0; half < 2; ++half) {
        const __m512i which = _mm512_slli_epi32(_mm512_set_epi64(0x0808080808080808, 0x0808080808080808, 0x0404040404040404, 0x0404040404040404, 0x0202020202020202, 0x0202020202020202, 0x0101010101010101, 0x0101010101010101), unsigned(4 * half));
        const __m512i code = _mm512_loadu_si512(codes + 64 * half);
        _mm512_storeu_si512(codes + 64 * half, _mm512_mask_add_epi8(code, _mm512_test_epi8_mask(bytes, which), code, _mm512_set1_epi8(char(one))));
    }
}

// Sums of the lanes of four registers.
inline __m128i sum_lanes(const __m512i x[4]) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}

// out[r][i] = sum over d of operands[r][d] times codes[i][d], four tokens at a time: of `out` up to three past the last are written.
template <int ROWS>
inline void dot_tokens(const uint8_t* codes, int64_t count, int64_t dim, const int8_t* operands, int32_t* out, int64_t out_stride) {
    const int64_t stride = code_stride(dim);
    for (int64_t i = 0; i < count; i += 4) {
        __m512i sum[ROWS][4] = {};
        const uint8_t* code[4];
        UNROLL for (int t = 0; t < 4; ++t) code[t] = codes + (i + t < count ? i + t : i) * stride;
        for (int64_t d = 0; d < dim; d += 64) {
            const __mmask64 inside = dim - d >= 64 ? ~0ull : (1ull << (dim - d)) - 1;
            UNROLL for (int r = 0; r < ROWS; ++r) {
                const __m512i operand = _mm512_maskz_loadu_epi8(inside, operands + r * dim + d);
                UNROLL for (int t = 0; t < 4; ++t) sum[r][t] = _mm512_dpbusd_epi32(sum[r][t], _mm512_loadu_si512(code[t] + d), operand);
            }
        }
        UNROLL for (int r = 0; r < ROWS; ++r) _mm_storeu_si128((__m128i*)(out + r * out_stride + i), sum_lanes(sum[r]));
    }
}

inline void token_dots(const uint8_t* codes, int64_t count, int64_t dim, const int8_t* operands, int64_t rows, int32_t* out, int64_t out_stride) {
    for (; rows >= 4; rows -= 4, operands += 4 * dim, out += 4 * out_stride) dot_tokens<4>(codes, count, dim, operands, out, out_stride);
    if (rows == 3) dot_tokens<3>(codes, count, dim, operands, out, out_stride);
    else if (rows == 2) dot_tokens<2>(codes, count, dim, operands, out, out_stride);
    else if (rows == 1) dot_tokens<1>(codes, count, dim, operands, out, out_stride);
}

// out[r][d] += size[r] times the sum over tokens of weights[r][i] (0..127) times the levels of codes[i][d]; total[r] = the sum of a row's
// weights. Up to four rows; there are weights for a multiple of four tokens, 0 past the last.
inline void add_token_sums(const uint8_t* codes, int64_t count, int64_t dim, const int8_t* weights, int64_t stride, int64_t rows, const float* size, const float* total, int64_t bits, float* out) {
    // Lanes of 16 bytes hold dims 0..3 of their sixteen last, so that dwords come out in order when bytes of four tokens are woven.
    const __m512i weave = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    for (int64_t d = 0; d < dim; d += 64) {
        __m512i sum[4][4] = {};
        for (int64_t i = 0; i < count; i += 4) {
            __m512i code[4];
            UNROLL for (int64_t b = 0; b < 4; ++b)  // past the last any will do
                code[b] = _mm512_permutexvar_epi32(weave, _mm512_loadu_si512(codes + (i + b < count ? i + b : i) * code_stride(dim) + d));
            const __m512i low01 = _mm512_unpacklo_epi8(code[0], code[1]), high01 = _mm512_unpackhi_epi8(code[0], code[1]);
            const __m512i low23 = _mm512_unpacklo_epi8(code[2], code[3]), high23 = _mm512_unpackhi_epi8(code[2], code[3]);
            const __m512i four[4] = {_mm512_unpacklo_epi16(low01, low23), _mm512_unpackhi_epi16(low01, low23), _mm512_unpacklo_epi16(high01, high23), _mm512_unpackhi_epi16(high01, high23)};
            UNROLL for (int64_t r = 0; r < 4; ++r) {
                int32_t weight;
                std::memcpy(&weight, weights + (r < rows ? r : 0) * stride + i, 4);
                UNROLL for (int v = 0; v < 4; ++v) sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], four[v], _mm512_set1_epi32(weight));
            }
        }
        UNROLL for (int64_t r = 0; r < 4; ++r) {
            if (r >= rows) continue;
            const __m512i less = _mm512_set1_epi32(((1 << bits) - 1) * int32_t(total[r]));
            const __m512 by = _mm512_set1_ps(size[r]);
            UNROLL for (int v = 0; v < 4; ++v) {
                const int64_t left = dim - d - 16 * v;
                if (left <= 0) continue;
                const __mmask16 inside = left >= 16 ? 0xffff : (1u << left) - 1;
                const __m512 found = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(sum[r][v], sum[r][v]), less));
                float* to = out + r * dim + d + 16 * v;
                _mm512_mask_storeu_ps(to, inside, _mm512_fmadd_ps(found, by, _mm512_maskz_loadu_ps(inside, to)));
            }
        }
    }
}

#else

template <class At>
inline void read_low(int64_t count, const At& at, int64_t planes, int64_t dim, uint8_t* codes) {
    std::memset(codes, 0, size_t(count * code_stride(dim)));
    for (int64_t i = 0; i < count; ++i, codes += code_stride(dim))
        for (int64_t p = 0; p < planes; ++p)
            for (int64_t d = 0; d < dim; ++d) codes[d] = uint8_t(2 * codes[d] + ((at(i)[p * (dim / 8) + d / 8] >> (d % 8)) & 1));
}

inline void token_dots(const uint8_t* codes, int64_t count, int64_t dim, const int8_t* operands, int64_t rows, int32_t* out, int64_t out_stride) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < count; ++i) {
            int32_t sum = 0;
            for (int64_t d = 0; d < dim; ++d) sum += codes[i * code_stride(dim) + d] * operands[r * dim + d];
            out[r * out_stride + i] = sum;
        }
}

inline void add_token_sums(const uint8_t* codes, int64_t count, int64_t dim, const int8_t* weights, int64_t stride, int64_t rows, const float* size, const float* total, int64_t bits, float* out) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < dim; ++d) {
            int32_t sum = 0;
            for (int64_t i = 0; i < count; ++i) sum += codes[i * code_stride(dim) + d] * weights[r * stride + i];
            out[r * dim + d] += float(2 * sum - ((1 << bits) - 1) * int32_t(total[r])) * size[r];
        }
}

#endif

// codes[d] += one where a plane of values (words [P/4][D/8]) has the bit of a token set.
inline void add_bits(const uint8_t* words, int64_t dim, int64_t token, int one, uint8_t* codes) {
#if defined(__AVX512VBMI__)
    if (dim == 64 || dim == 128) return add_bits_of_line(words, dim, token, one, codes);
#endif
    const int64_t width = dim / 8;
    const uint8_t* bytes = words + token / 4 * 4 * width + token % 4;
    for (int64_t j = 0; j < 8; ++j)
        for (int64_t i = 0; i < width; ++i) codes[j * width + i] = uint8_t(codes[j * width + i] + ((bytes[4 * i] >> j) & 1) * one);
}

}  // namespace
