// The integer core: bit planes times bytes. One primitive serves keys (words [D/4][P/8], operands = query codes) and values
// (words [P/4][D/8], operands = token weights). word & (0x01010101 << j) is four bytes 0 or 2^j; their dot product with four signed
// bytes is one lane of a VNNI instruction, and the sum is divided by 2^j at the end.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// ROWS operand rows, bit columns J0 .. J1-1, sixteen words at a time (or two rows of eight words: PAIR). Rows of zeros are passed over.
template <int ROWS, int J0, int J1, bool PAIR>
inline void dot_block(const uint32_t* words, int64_t height, int64_t width, __mmask16 lanes, const int32_t* operands, int64_t stride, int32_t* out, int64_t out_stride) {
    constexpr int J = J1 - J0;
    __m512i sum[ROWS][J], mask[J];
    for (int j = 0; j < J; ++j) mask[j] = _mm512_set1_epi32(0x01010101u << (J0 + j));
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < J; ++j) sum[r][j] = _mm512_setzero_si512();
    const __m512i halves = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    for (int64_t k = 0; k < height; k += PAIR ? 2 : 1) {
        int64_t any = 0;
        for (int r = 0; r < ROWS; ++r) {
            int64_t both;
            if (PAIR) std::memcpy(&both, operands + r * stride + k, 8); else both = operands[r * stride + k];
            any |= both;
        }
        if (!any) continue;
        const __m512i word = PAIR ? _mm512_loadu_si512(words + k * width) : _mm512_maskz_loadu_epi32(lanes, words + k * width);
        __m512i operand[ROWS];
        for (int r = 0; r < ROWS; ++r)
            operand[r] = PAIR ? _mm512_permutexvar_epi32(halves, _mm512_zextsi128_si512(_mm_loadl_epi64((const __m128i*)(operands + r * stride + k))))
                              : _mm512_set1_epi32(operands[r * stride + k]);
        for (int j = 0; j < J; ++j) {
            const __m512i column = _mm512_and_si512(word, mask[j]);
            for (int r = 0; r < ROWS; ++r) sum[r][j] = _mm512_dpbusd_epi32(sum[r][j], column, operand[r]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < J; ++j) {
            const __m512i total = _mm512_sra_epi32(sum[r][j], _mm_cvtsi32_si128(J0 + j));
            int32_t* to = out + r * out_stride + (J0 + j) * width;
            if (PAIR) _mm256_storeu_si256((__m256i*)to, _mm256_add_epi32(_mm512_castsi512_si256(total), _mm512_extracti64x4_epi64(total, 1)));
            else _mm512_mask_storeu_epi32(to, lanes, total);
        }
}

template <int ROWS>
inline void dot_rows(const uint32_t* words, int64_t height, int64_t width, const int32_t* operands, int64_t stride, int32_t* out, int64_t out_stride) {
    // 32 registers: four rows take the bit columns in two halves, so that each masked column serves four products.
    constexpr int HALF = ROWS > 3 ? 4 : 8;
    if (width == 8) {
        dot_block<ROWS, 0, HALF, true>(words, height, width, 0xffff, operands, stride, out, out_stride);
        if (HALF == 4) dot_block<ROWS, 8 - HALF, 8, true>(words, height, width, 0xffff, operands, stride, out, out_stride);
        return;
    }
    for (int64_t first = 0; first < width; first += 16) {
        const __mmask16 lanes = width - first >= 16 ? 0xffff : (1u << (width - first)) - 1;
        dot_block<ROWS, 0, HALF, false>(words + first, height, width, lanes, operands, stride, out + first, out_stride);
        if (HALF == 4) dot_block<ROWS, 8 - HALF, 8, false>(words + first, height, width, lanes, operands, stride, out + first, out_stride);
    }
}

inline void plane_dot(const uint32_t* words, int64_t height, int64_t width, const int32_t* operands, int64_t stride, int64_t rows, int32_t* out) {
    const int64_t out_stride = 8 * width;
    while (rows > 0) {
        const int64_t take = rows == 4 ? 4 : rows >= 3 ? 3 : rows;
        if (take == 4) dot_rows<4>(words, height, width, operands, stride, out, out_stride);
        else if (take == 3) dot_rows<3>(words, height, width, operands, stride, out, out_stride);
        else if (take == 2) dot_rows<2>(words, height, width, operands, stride, out, out_stride);
        else dot_rows<1>(words, height, width, operands, stride, out, out_stride);
        operands += take * stride, out += take * out_stride, rows -= take;
    }
}

#elif defined(__AVX2__)

template <int ROWS>
inline void dot_rows(const uint32_t* words, int64_t height, int64_t width, int64_t first, int j, const int32_t* operands, int64_t stride, int32_t* out, int64_t out_stride) {
    const __m256i mask = _mm256_set1_epi32(0x01010101u << j), ones = _mm256_set1_epi16(1);
    const __m256i lanes = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(width - first)), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
    __m256i sum[ROWS];
    for (int r = 0; r < ROWS; ++r) sum[r] = _mm256_setzero_si256();
    for (int64_t k = 0; k < height; ++k) {
        int32_t any = 0;
        for (int r = 0; r < ROWS; ++r) any |= operands[r * stride + k];
        if (!any) continue;
        const __m256i column = _mm256_and_si256(_mm256_maskload_epi32((const int*)words + k * width + first, lanes), mask);
        for (int r = 0; r < ROWS; ++r)  // two products of at most 128 * 127 fit 16 bits
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(_mm256_maddubs_epi16(column, _mm256_set1_epi32(operands[r * stride + k])), ones));
    }
    for (int r = 0; r < ROWS; ++r)
        _mm256_maskstore_epi32(out + r * out_stride + j * width + first, lanes, _mm256_sra_epi32(sum[r], _mm_cvtsi32_si128(j)));
}

inline void plane_dot(const uint32_t* words, int64_t height, int64_t width, const int32_t* operands, int64_t stride, int64_t rows, int32_t* out) {
    const int64_t out_stride = 8 * width;
    for (; rows > 0; rows -= 4, operands += 4 * stride, out += 4 * out_stride)
        for (int64_t first = 0; first < width; first += 8)
            for (int j = 0; j < 8; ++j) {
                if (rows >= 4) dot_rows<4>(words, height, width, first, j, operands, stride, out, out_stride);
                else if (rows == 3) dot_rows<3>(words, height, width, first, j, operands, stride, out, out_stride);
                else if (rows == 2) dot_rows<2>(words, height, width, first, j, operands, stride, out, out_stride);
                else dot_rows<1>(words, height, width, first, j, operands, stride, out, out_stride);
            }
}

#else

inline void plane_dot(const uint32_t* words, int64_t height, int64_t width, const int32_t* operands, int64_t stride, int64_t rows, int32_t* out) {
    std::memset(out, 0, rows * 8 * width * sizeof(int32_t));
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < height; ++k) {
            const int32_t operand = operands[r * stride + k];
            if (!operand) continue;
            for (int b = 0; b < 4; ++b) {
                const int32_t factor = int8_t(operand >> (8 * b));
                for (int j = 0; j < 8; ++j)
                    for (int64_t i = 0; i < width; ++i) out[r * 8 * width + j * width + i] += ((words[k * width + i] >> (8 * b + j)) & 1) * factor;
            }
        }
}

#endif

// sum over d of codes[d] * low[d], low = `planes` bit planes of dim / 8 bytes, most significant first, bit d % 8 of byte d / 8.
inline int32_t low_dot(const uint8_t* low, int64_t planes, int64_t dim, const int8_t* codes) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    __m512i sum = _mm512_setzero_si512();
    for (int64_t first = 0; first < dim; first += 64) {
        const int64_t lanes = dim - first < 64 ? dim - first : 64;
        const __mmask64 inside = lanes == 64 ? ~0ull : (1ull << lanes) - 1;
        const __m512i code = _mm512_maskz_loadu_epi8(inside, codes + first);
        for (int64_t p = 0; p < planes; ++p) {
            uint64_t mask = 0;
            std::memcpy(&mask, low + p * (dim / 8) + first / 8, lanes / 8);
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(char(1 << (planes - 1 - p))), _mm512_maskz_mov_epi8(mask, code));
        }
    }
    return _mm512_reduce_add_epi32(sum);
#else
    int32_t sum = 0;
    for (int64_t p = 0; p < planes; ++p) {
        int32_t part = 0;
        for (int64_t d = 0; d < dim; ++d) part += ((low[p * (dim / 8) + d / 8] >> (d % 8)) & 1) * codes[d];
        sum += part << (planes - 1 - p);
    }
    return sum;
#endif
}

// out[d] += weight * low[d], low as in low_dot.
inline void low_add(const uint8_t* low, int64_t planes, int64_t dim, int32_t weight, int32_t* out) {
    for (int64_t p = 0; p < planes; ++p) {
        const int32_t factor = weight << (planes - 1 - p);
        const uint8_t* plane = low + p * (dim / 8);
#if defined(__AVX512F__)
        int64_t d = 0;
        for (; d + 16 <= dim; d += 16) {
            uint16_t mask;
            std::memcpy(&mask, plane + d / 8, 2);
            const __m512i old = _mm512_loadu_si512(out + d);
            _mm512_storeu_si512(out + d, _mm512_mask_add_epi32(old, mask, old, _mm512_set1_epi32(factor)));
        }
        for (; d < dim; ++d) out[d] += ((plane[d / 8] >> (d % 8)) & 1) * factor;
#else
        for (int64_t d = 0; d < dim; ++d) out[d] += ((plane[d / 8] >> (d % 8)) & 1) * factor;
#endif
    }
}

}  // namespace
