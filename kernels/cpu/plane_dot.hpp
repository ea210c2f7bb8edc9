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

// Four bytes at any address.
inline int32_t load_word(const void* from) { int32_t word; std::memcpy(&word, from, 4); return word; }

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// Unrolled early, so that arrays indexed by the loop become registers.
#define UNROLL _Pragma("GCC unroll 8")

// The intrinsic of this instruction makes GCC copy the sums from register to register and spill them.
inline void accumulate(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// Bit k = operands of word first + k are not all zero, in any of ROWS rows.
template <int ROWS>
inline uint64_t used_words(const int8_t* operands, int64_t stride, int64_t first, int64_t height) {
    uint64_t used = 0;
    for (int64_t k = first; k < height && k < first + 64; k += 16) {
        const __mmask16 inside = height - k >= 16 ? 0xffff : (1u << (height - k)) - 1;
        __m512i any = _mm512_setzero_si512();
        for (int r = 0; r < ROWS; ++r) any = _mm512_or_si512(any, _mm512_maskz_loadu_epi32(inside, operands + r * stride + 4 * k));
        used |= uint64_t(_mm512_test_epi32_mask(any, any)) << (k - first);
    }
    return used;
}

// ROWS operand rows, bit columns J0 .. J1-1, sixteen words at a time (or two rows of eight words: PAIR). Rows of zeros are passed over.
template <int ROWS, int J0, int J1, bool PAIR>
inline void dot_block(const uint8_t* words, int64_t height, int64_t width, __mmask16 lanes, const int8_t* operands, int64_t stride, int32_t* out, int64_t out_stride) {
    constexpr int J = J1 - J0;
    __m512i sum[ROWS][J], mask[J];
    UNROLL for (int j = 0; j < J; ++j) mask[j] = _mm512_set1_epi32(int(0x01010101u << (J0 + j)));
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int j = 0; j < J; ++j) sum[r][j] = _mm512_setzero_si512();
    const __m512i halves = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    for (int64_t first = 0; first < height; first += 64) {
        uint64_t used = used_words<ROWS>(operands, stride, first, height);
        if (PAIR) used = (used | used >> 1) & 0x5555555555555555u;
        // No branch inside: the sums then stay in registers.
        for (; used; used &= used - 1) {
            const int64_t k = first + __builtin_ctzll(used);
            const uint8_t* row = words + 4 * k * width;
            const __m512i word = PAIR ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi32(lanes, row);
            __m512i operand[ROWS];
            UNROLL for (int r = 0; r < ROWS; ++r) {
                const int8_t* from = operands + r * stride + 4 * k;
                operand[r] = PAIR ? _mm512_permutexvar_epi32(halves, _mm512_zextsi128_si512(_mm_loadl_epi64((const __m128i*)from))) : _mm512_set1_epi32(load_word(from));
            }
            UNROLL for (int j = 0; j < J; ++j) {
                const __m512i column = _mm512_and_si512(word, mask[j]);
                UNROLL for (int r = 0; r < ROWS; ++r) accumulate(sum[r][j], column, operand[r]);
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int j = 0; j < J; ++j) {
            const __m512i total = _mm512_sra_epi32(sum[r][j], _mm_cvtsi32_si128(J0 + j));
            int32_t* to = out + r * out_stride + (J0 + j) * width;
            if (PAIR) _mm256_storeu_si256((__m256i*)to, _mm256_add_epi32(_mm512_castsi512_si256(total), _mm512_extracti64x4_epi64(total, 1)));
            else _mm512_mask_storeu_epi32(to, lanes, total);
        }
}

template <int ROWS>
inline void dot_rows(const uint8_t* words, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int32_t* out, int64_t out_stride) {
    // 32 registers: with three or four rows the bit columns are taken in halves, each masked column serving all rows.
    constexpr int HALF = ROWS > 2 ? 4 : 8;
    if (width == 8) {
        dot_block<ROWS, 0, HALF, true>(words, height, width, 0xffff, operands, stride, out, out_stride);
        if (HALF == 4) dot_block<ROWS, 8 - HALF, 8, true>(words, height, width, 0xffff, operands, stride, out, out_stride);
        return;
    }
    for (int64_t first = 0; first < width; first += 16) {
        const __mmask16 lanes = width - first >= 16 ? 0xffff : (1u << (width - first)) - 1;
        dot_block<ROWS, 0, HALF, false>(words + 4 * first, height, width, lanes, operands, stride, out + first, out_stride);
        if (HALF == 4) dot_block<ROWS, 8 - HALF, 8, false>(words + 4 * first, height, width, lanes, operands, stride, out + first, out_stride);
    }
}

inline void plane_dot(const uint8_t* words, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, int32_t* out, int64_t out_stride) {
    while (rows > 0) {
        const int64_t take = rows == 5 ? 3 : rows < 4 ? rows : 4;
        if (take == 4) dot_rows<4>(words, height, width, operands, stride, out, out_stride);
        else if (take == 3) dot_rows<3>(words, height, width, operands, stride, out, out_stride);
        else if (take == 2) dot_rows<2>(words, height, width, operands, stride, out, out_stride);
        else dot_rows<1>(words, height, width, operands, stride, out, out_stride);
        operands += take * stride, out += take * out_stride, rows -= take;
    }
}

#elif defined(__AVX2__)

template <int ROWS>
inline void dot_rows(const uint8_t* words, int64_t height, int64_t width, int64_t first, int j, const int8_t* operands, int64_t stride, int32_t* out, int64_t out_stride) {
    const __m256i mask = _mm256_set1_epi32(int(0x01010101u << j)), ones = _mm256_set1_epi16(1);
    const __m256i lanes = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(width - first)), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
    __m256i sum[ROWS];
    for (int r = 0; r < ROWS; ++r) sum[r] = _mm256_setzero_si256();
    for (int64_t k = 0; k < height; ++k) {
        int32_t operand[ROWS], any = 0;
        for (int r = 0; r < ROWS; ++r) any |= operand[r] = load_word(operands + r * stride + 4 * k);
        if (!any) continue;
        const __m256i column = _mm256_and_si256(_mm256_maskload_epi32((const int*)(words + 4 * (k * width + first)), lanes), mask);
        for (int r = 0; r < ROWS; ++r)  // two products of at most 128 * 127 fit 16 bits
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(_mm256_maddubs_epi16(column, _mm256_set1_epi32(operand[r])), ones));
    }
    for (int r = 0; r < ROWS; ++r)
        _mm256_maskstore_epi32(out + r * out_stride + j * width + first, lanes, _mm256_sra_epi32(sum[r], _mm_cvtsi32_si128(j)));
}

inline void plane_dot(const uint8_t* words, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, int32_t* out, int64_t out_stride) {
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

inline void plane_dot(const uint8_t* words, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, int32_t* out, int64_t out_stride) {
    for (int64_t r = 0; r < rows; ++r) {
        int32_t* to = out + r * out_stride;
        std::memset(to, 0, 8 * width * sizeof(int32_t));
        for (int64_t k = 0; k < height; ++k)
            for (int b = 0; b < 4; ++b) {
                const int32_t factor = operands[r * stride + 4 * k + b];
                if (!factor) continue;
                const uint8_t* bytes = words + 4 * k * width + b;
                for (int j = 0; j < 8; ++j)
                    for (int64_t i = 0; i < width; ++i) to[j * width + i] += ((bytes[4 * i] >> j) & 1) * factor;
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
        sum += part * (1 << (planes - 1 - p));
    }
    return sum;
#endif
}

// out[r][d] += sum over t of weights[r][t] * low_t[d], the low planes of `tokens` tokens one after another, each as in low_dot. Tokens that
// no row gives a weight are passed over.
inline void low_values(const uint8_t* low, int64_t planes, int64_t dim, const int8_t* weights, int64_t tokens, int64_t rows, int32_t* out) {
    const int64_t bytes = planes * dim / 8;
    for (int64_t first = 0; first < tokens; first += 4) {
        int32_t any = 0;
        for (int64_t r = 0; r < rows; ++r) any |= load_word(weights + r * tokens + first);
        if (!any) continue;
#if defined(__AVX512VNNI__)
        for (int64_t d = 0; d < dim; d += 16) {
            const int64_t lanes = dim - d < 16 ? dim - d : 16;
            const __mmask16 inside = __mmask16((1u << lanes) - 1);
            __m512i code = _mm512_setzero_si512();  // four tokens' codes of one dim in a lane
            for (int64_t b = 0; b < 4; ++b) {
                if (!(any >> (8 * b) & 0xff)) continue;
                for (int64_t p = 0; p < planes; ++p) {
                    uint16_t mask = 0;
                    std::memcpy(&mask, low + (first + b) * bytes + p * (dim / 8) + d / 8, size_t(lanes / 8));
                    code = _mm512_mask_or_epi32(code, mask, code, _mm512_set1_epi32(1 << (planes - 1 - p + 8 * b)));
                }
            }
            for (int64_t r = 0; r < rows; ++r) {
                int32_t* to = out + r * dim + d;
                const __m512i sum = _mm512_maskz_loadu_epi32(inside, to), weight = _mm512_set1_epi32(load_word(weights + r * tokens + first));
                _mm512_mask_storeu_epi32(to, inside, _mm512_dpbusd_epi32(sum, code, weight));
            }
        }
#else
        for (int64_t t = first; t < first + 4; ++t)
            for (int64_t r = 0; r < rows; ++r) {
                const int32_t weight = weights[r * tokens + t];
                if (!weight) continue;
                for (int64_t p = 0; p < planes; ++p) {
                    const int32_t factor = weight * (1 << (planes - 1 - p));
                    const uint8_t* plane = low + t * bytes + p * (dim / 8);
                    for (int64_t d = 0; d < dim; ++d) out[r * dim + d] += ((plane[d / 8] >> (d % 8)) & 1) * factor;
                }
            }
#endif
    }
}

}  // namespace
