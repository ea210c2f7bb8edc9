// The integer core with 256-bit registers, one plane and column at a time: word & (0x01010101 << j) is four bytes 0 or 2^j, whose dot
// product with four operands is one instruction of AVX-VNNI, and two of AVX2. The sum is divided by 2^j at the end.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

// Four bytes at any address.
inline int32_t load_word(const void* from) { int32_t word; std::memcpy(&word, from, 4); return word; }

inline __m256i accumulate(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sum, unsigned_bytes, signed_bytes);
#else  // two products of at most 128 * 127 fit 16 bits
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned_bytes, signed_bytes), _mm256_set1_epi16(1)));
#endif
}

// Column j of eight words, ROWS rows: out = 2 * out (nothing if `first`) + the sum of operands times +-1.
template <int ROWS>
inline void add_column(const uint8_t* words, int64_t height, int64_t width, int64_t at, int j, const int8_t* operands, int64_t stride, bool first, int32_t* out, int64_t out_stride) {
    const __m256i mask = _mm256_set1_epi32(int(0x01010101u << j)), ones = _mm256_set1_epi8(1);
    const __m256i lanes = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(width - at)), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
    __m256i sum[ROWS], total[ROWS];
    for (int r = 0; r < ROWS; ++r) sum[r] = total[r] = _mm256_setzero_si256();
    for (int64_t k = 0; k < height; ++k) {
        int32_t operand[ROWS], any = 0;
        for (int r = 0; r < ROWS; ++r) any |= operand[r] = load_word(operands + r * stride + 4 * k);
        if (!any) continue;
        const __m256i column = _mm256_and_si256(_mm256_maskload_epi32((const int*)(words + 4 * (k * width + at)), lanes), mask);
        for (int r = 0; r < ROWS; ++r) {
            const __m256i four = _mm256_set1_epi32(operand[r]);
            sum[r] = accumulate(sum[r], column, four);
            total[r] = accumulate(total[r], ones, four);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        int* to = out + r * out_stride + j * width + at;
        __m256i found = _mm256_sub_epi32(_mm256_slli_epi32(_mm256_sra_epi32(sum[r], _mm_cvtsi32_si128(j)), 1), total[r]);
        if (!first) found = _mm256_add_epi32(found, _mm256_slli_epi32(_mm256_maskload_epi32(to, lanes), 1));
        _mm256_maskstore_epi32(to, lanes, found);
    }
}

inline void add_plane(const uint8_t* words, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, bool first, int32_t* out, int64_t out_stride) {
    for (; rows > 0; rows -= 4, operands += 4 * stride, out += 4 * out_stride)
        for (int64_t at = 0; at < width; at += 8)
            for (int j = 0; j < 8; ++j) {
                if (rows >= 4) add_column<4>(words, height, width, at, j, operands, stride, first, out, out_stride);
                else if (rows == 3) add_column<3>(words, height, width, at, j, operands, stride, first, out, out_stride);
                else if (rows == 2) add_column<2>(words, height, width, at, j, operands, stride, first, out, out_stride);
                else add_column<1>(words, height, width, at, j, operands, stride, first, out, out_stride);
            }
}

}  // namespace
