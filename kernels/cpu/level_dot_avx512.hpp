// The integer core with AVX-512 VBMI and VNNI: sums of four operands looked up by four bits.
//
// Four words of one column hold four bits for each of their bytes b, operands 4 k + b, k = 0 .. 3. The sum of |operand| over those
// whose sign agrees with their bit is an entry of a table of 4 x 16 bytes: one byte permutation looks up 64 of them, and one dot product
// with twos adds the four of a lane. Two instructions do 256 multiply-adds, where the dot product alone does 64 an instruction. With L
// lookups, the sum of operands times +-1 is 2 L - sum |operand|. Entries stop at 255; what is above goes to a second table, which few
// blocks of operands have: codes of a query are spread like a normal, and weights of a page have few large ones.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "ahead.hpp"

namespace {

// Unrolled early, so that arrays indexed by the loop become registers.
#define UNROLL _Pragma("GCC unroll 8")

// The intrinsic of this instruction makes GCC copy the sums from register to register and spill them.
inline void accumulate(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// Bits of `ones` where `mask` has them, else of `zeros`.
inline __m512i choose_bits(int mask, __m512i ones, __m512i zeros) {
    return _mm512_ternarylogic_epi32(ones, _mm512_set1_epi8(char(mask)), zeros, 0xe2);
}

// Four sums += twos times what `index` finds in the table (PAIR: in the table and the one behind it) where `some` is not 0. The branch is
// hidden from the compiler, which would keep two copies of the sums on its account.
template <bool PAIR>
inline void accumulate_some(__m512i sum[4], const __m512i index[4], const uint8_t* table, int64_t behind, uint32_t some, __m512i twos) {
    __m512i first = _mm512_undefined_epi32(), found = first;
#define LOOK_UP(i, s) "vmovdqa64 %[" #i "], %[found]\n\tvpermi2b (%[table],%[behind]), %[first], %[found]\n\tvpdpbusd %[twos], %[found], %[" #s "]\n\t"
#define PERMUTE(i, s) "vpermb %[first], %[" #i "], %[found]\n\tvpdpbusd %[twos], %[found], %[" #s "]\n\t"
#define OPERANDS [s0] "+v"(sum[0]), [s1] "+v"(sum[1]), [s2] "+v"(sum[2]), [s3] "+v"(sum[3]), [first] "+v"(first), [found] "+v"(found) \
    : [i0] "v"(index[0]), [i1] "v"(index[1]), [i2] "v"(index[2]), [i3] "v"(index[3]), [table] "r"(table), [behind] "r"(behind), [some] "r"(some), [twos] "v"(twos) : "cc", "memory"
    if (PAIR) asm("test %[some], %[some]\n\tjz 1f\n\tvmovdqa64 (%[table]), %[first]\n\t" LOOK_UP(i0, s0) LOOK_UP(i1, s1) LOOK_UP(i2, s2) LOOK_UP(i3, s3) "1:" : OPERANDS);
    else asm("test %[some], %[some]\n\tjz 1f\n\tvmovdqa64 (%[table]), %[first]\n\t" PERMUTE(i0, s0) PERMUTE(i1, s1) PERMUTE(i2, s2) PERMUTE(i3, s3) "1:" : OPERANDS);
#undef LOOK_UP
#undef PERMUTE
#undef OPERANDS
}

constexpr int64_t ONES = 0x0101010101010101;
constexpr uint64_t EVEN = 0x1111111111111111;  // bits of even blocks
constexpr int FETCHED = 3;  // lines of what comes next that are asked for with each block
constexpr int64_t BLOCKS = 32;  // of 16 operands (four words): head dims up to 512

// Tables of ROWS rows. PAIR: words 2 i and 2 i + 1 lie in one register, so that even and odd words take turns in blocks.
template <int ROWS, bool PAIR>
struct Tables {
    alignas(64) uint8_t entry[BLOCKS][ROWS][64], excess[BLOCKS][ROWS][64];
    uint64_t used, over[ROWS];  // bit 2 i: block i has an operand that is not 0 in any row; an excess
    int32_t total[ROWS];  // of |operand|

    // Operands of `height` words.
    Tables(const int8_t* operands, int64_t stride, int64_t height) {
        const __m512i turns = _mm512_set_epi32(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0);
        used = 0;
        for (int r = 0; r < ROWS; ++r) {
            __m512i sums = _mm512_setzero_si512();
            over[r] = 0;
            for (int64_t k = 0; k < height; k += 16) {  // four blocks
                const __mmask16 inside = height - k >= 16 ? 0xffff : (1u << (height - k)) - 1;
                __m512i x = _mm512_maskz_loadu_epi32(inside, operands + r * stride + 4 * k);
                if (PAIR) x = _mm512_permutexvar_epi32(turns, x);
                const __m512i size = _mm512_abs_epi8(x);
                sums = _mm512_add_epi64(sums, _mm512_sad_epu8(size, _mm512_setzero_si512()));
                const __m512i two = _mm512_adds_epu8(size, _mm512_shuffle_epi32(size, _MM_PERM_ENUM(0xb1)));
                const __m512i most = _mm512_adds_epu8(two, _mm512_shuffle_epi32(two, _MM_PERM_ENUM(0x4e)));
                used |= uint64_t(_mm512_test_epi64_mask(most, most) & 0x55) << (k / 2);
                const __m512i above = _mm512_subs_epu8(most, _mm512_set1_epi8(char(254)));
                uint64_t full = _mm512_test_epi64_mask(above, above) & 0x55;
                if (PAIR) full = ((full | full >> 2) & EVEN) * 5;  // both or none
                over[r] |= full << (k / 2);
                fill(x, r, k / 4, full != 0);
            }
            total[r] = int32_t(_mm512_reduce_add_epi64(sums));
        }
        if (PAIR) used = (used | used >> 2) & EVEN;
    }

    // Tables of four blocks of operands.
    void fill(__m512i operands, int row, int64_t block, bool exceeds) {
        constexpr uint64_t FIRST = 0xaaaaaaaaaaaaaaaa, SECOND = 0xcccccccccccccccc;  // of two bits, the one that an operand needs
        const __m512i lane = _mm512_set_epi64(3 * ONES, 3 * ONES, 2 * ONES, 2 * ONES, ONES, ONES, 0, 0);
        const __m512i word = _mm512_add_epi8(lane, _mm512_broadcast_i32x4(_mm_set_epi64x(0x1818181810101010, 0x0808080800000000)));
        const __m512i near = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0302010003020100, 0x0302010003020100));
        const __m512i far = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0707070706060606, 0x0505050504040404));
        const bool negative = _mm512_movepi8_mask(operands) != 0;
        const __m512i plus = negative ? _mm512_max_epi8(operands, _mm512_setzero_si512()) : operands, minus = _mm512_sub_epi8(plus, operands);
        UNROLL for (int half = 0; half < 2; ++half) {  // two blocks, eight bytes of a lane each: sums of operands 0 and 1, and of 2 and 3
            const __m512i first = _mm512_add_epi8(word, _mm512_set1_epi8(char(32 * half))), second = _mm512_add_epi8(first, _mm512_set1_epi8(4));
            __m512i pairs = _mm512_add_epi8(_mm512_maskz_permutexvar_epi8(FIRST, first, plus), _mm512_maskz_permutexvar_epi8(SECOND, second, plus));
            if (negative) {
                pairs = _mm512_add_epi8(pairs, _mm512_maskz_permutexvar_epi8(~FIRST, first, minus));
                pairs = _mm512_add_epi8(pairs, _mm512_maskz_permutexvar_epi8(~SECOND, second, minus));
            }
            UNROLL for (int b = 0; b < 2; ++b) {
                const __m512i of_block = _mm512_set1_epi8(char(8 * b)), a = _mm512_shuffle_epi8(pairs, _mm512_or_si512(near, of_block));
                const __m512i c = _mm512_shuffle_epi8(pairs, _mm512_or_si512(far, of_block)), sum = _mm512_adds_epu8(a, c);
                _mm512_store_si512(entry[block + 2 * half + b][row], sum);
                if (exceeds) _mm512_store_si512(excess[block + 2 * half + b][row], _mm512_sub_epi8(_mm512_add_epi8(a, c), sum));
            }
        }
    }
};

// Indices of the lookups of four columns, j = ODD, ODD + 2, .. (in the order 0, 4, 2, 6), from four words: bits 0..3 of each byte from
// the words, the rest from `place`.
template <bool ODD>
inline void indices(const __m512i word[4], __m512i place, __m512i index[4]) {
    const __m512i a = ODD ? choose_bits(0xaa, word[1], _mm512_srli_epi32(word[0], 1)) : choose_bits(0xaa, _mm512_add_epi8(word[1], word[1]), word[0]);
    const __m512i b = ODD ? choose_bits(0xaa, word[3], _mm512_srli_epi32(word[2], 1)) : choose_bits(0xaa, _mm512_add_epi8(word[3], word[3]), word[2]);
    const __m512i near = choose_bits(0xcc, _mm512_slli_epi32(b, 2), a), far = choose_bits(0xcc, b, _mm512_srli_epi32(a, 2));
    const __m512i low = _mm512_set1_epi8(15);
    index[0] = _mm512_ternarylogic_epi32(near, low, place, 0xea);
    index[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(near, 4), low, place, 0xea);
    index[2] = _mm512_ternarylogic_epi32(far, low, place, 0xea);
    index[3] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(far, 4), low, place, 0xea);
}

// Four columns of ROWS rows, sixteen words at a time (PAIR: two rows of eight). out = 2 * out (nothing if `first`) + sum.
template <int ROWS, bool ODD, bool PAIR>
inline void add_columns(const Tables<ROWS, PAIR>& tables, const uint8_t* words, int64_t height, int64_t width, __mmask16 lanes, bool first, int32_t* out, int64_t out_stride, const uint8_t* fetch) {
    const __m512i byte = _mm512_set1_epi32(0x30201000);
    const __m512i place = PAIR ? _mm512_or_si512(byte, _mm512_maskz_set1_epi8(0xffffffff00000000, 64)) : byte, twos = _mm512_set1_epi8(2);
    constexpr int64_t STEP = PAIR ? 2 : 1;
    __m512i sum[ROWS][4];
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_setzero_si512();
    __m512i index[4];
    auto look = [&](uint64_t left, __m512i to[4]) {
        const int64_t block = left ? __builtin_ctzll(left) / 2 : 0;
        __m512i word[4];
        UNROLL for (int k = 0; k < 4; ++k) {  // past the last word any will do: its operands are 0
            const int64_t row = 4 * block + STEP * k, last = height - STEP;
            word[k] = _mm512_maskz_loadu_epi32(lanes, words + 4 * width * (row < last ? row : last));
        }
        indices<ODD>(word, place, to);
    };
    look(tables.used, index);
    for (uint64_t left = tables.used; left;) {
        const int64_t bit = __builtin_ctzll(left), block = bit / 2;
        left &= left - 1;
        __m512i next[4];
        look(left, next);
        UNROLL for (int i = 0; i < FETCHED; ++i) __builtin_prefetch(fetch + i * LINE_BYTES, 0, 2);
        fetch += FETCHED * LINE_BYTES;
        UNROLL for (int r = 0; r < ROWS; ++r) {
            const __m512i table = _mm512_load_si512(tables.entry[block][r]);
            UNROLL for (int c = 0; c < 4; ++c)
                accumulate(sum[r][c], PAIR ? _mm512_permutex2var_epi8(table, index[c], _mm512_load_si512(tables.entry[block + 1][r])) : _mm512_permutexvar_epi8(index[c], table), twos);
        }
        UNROLL for (int r = 0; r < ROWS; ++r)
            accumulate_some<PAIR>(sum[r], index, tables.excess[block][r], ROWS * 64, uint32_t(tables.over[r] >> bit) & 1, twos);
        UNROLL for (int c = 0; c < 4; ++c) index[c] = next[c];
    }
    constexpr int COLUMN[4] = {0, 4, 2, 6};
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int c = 0; c < 4; ++c) {
            int32_t* to = out + r * out_stride + (COLUMN[c] + ODD) * width;
            const __mmask16 inside = PAIR ? 0xff : lanes;
            __m512i found = _mm512_sub_epi32(sum[r][c], _mm512_set1_epi32(tables.total[r]));
            if (PAIR) found = _mm512_add_epi32(found, _mm512_zextsi256_si512(_mm512_extracti64x4_epi64(sum[r][c], 1)));
            if (!first) found = _mm512_add_epi32(found, _mm512_slli_epi32(_mm512_maskz_loadu_epi32(inside, to), 1));
            _mm512_mask_storeu_epi32(to, inside, found);
        }
}

template <int ROWS, bool PAIR>
inline void dot_planes(const Tables<ROWS, PAIR>& tables, const uint8_t* words, int64_t planes, int64_t height, int64_t width, int32_t* out, int64_t out_stride, Ahead& ahead) {
    auto fetch = [&] {
        const uint8_t* from = ahead.take(FETCHED * __builtin_popcountll(tables.used));
        return from ? from : words;
    };
    for (int64_t plane = 0; plane < planes; ++plane, words += 4 * height * width)
        for (int64_t at = 0; at < width; at += 16) {
            const __mmask16 lanes = PAIR || width - at >= 16 ? 0xffff : (1u << (width - at)) - 1;
            add_columns<ROWS, false, PAIR>(tables, words + 4 * at, height, width, lanes, plane == 0, out + at, out_stride, fetch());
            add_columns<ROWS, true, PAIR>(tables, words + 4 * at, height, width, lanes, plane == 0, out + at, out_stride, fetch());
        }
}

template <int ROWS, bool PAIR>
inline void dot_arrays(const uint8_t* const* words, int64_t count, int64_t planes, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int32_t* out, int64_t out_stride, Ahead& ahead) {
    const Tables<ROWS, PAIR> tables(operands, stride, height);
    for (int64_t i = 0; i < count; ++i) {
        dot_planes(tables, words[i], planes, height, width, out + i * 8 * width, out_stride, ahead);
    }
}

template <int ROWS>
inline void dot_rows(const uint8_t* const* words, int64_t count, int64_t planes, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int32_t* out, int64_t out_stride, Ahead& ahead) {
    if (width == 8) dot_arrays<ROWS, true>(words, count, planes, height, width, operands, stride, out, out_stride, ahead);
    else dot_arrays<ROWS, false>(words, count, planes, height, width, operands, stride, out, out_stride, ahead);
}

}  // namespace
