// The integer core with AVX-512 VBMI and VNNI. Both ways below gather, from four words of one column, four bits for each byte of the
// words: a number of four bits in each byte of a register, for all eight columns.
//
// One plane: words of four k. The sum of |operand| over those of operands 4 k + b whose sign agrees with their bit is an entry of a table of
// 4 x 16 bytes: one byte permutation looks up 64 of them, and one dot product with twos adds the four of a lane. Two instructions do 256
// multiply-adds, where the dot product alone does 64 an instruction. With L lookups, the sum of operands times +-1 is 2 L - sum |operand|.
// Entries stop at 255; what is above goes to a second table, which few blocks of operands have: codes of a query are spread like a normal,
// and weights of a page have few large ones.
//
// More planes: words of up to four planes of one k. The numbers are codes, and one dot product multiplies 64 of them with their operands.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "ahead.hpp"
#include "room.hpp"

namespace {

// Unrolled early, so that arrays indexed by the loop become registers.
#define UNROLL _Pragma("GCC unroll 8")
// What holds arrays of registers must become part of the function around it, whatever its size.
#define INLINE inline __attribute__((always_inline))

// The intrinsic of this instruction makes GCC copy the sums from register to register and spill them.
INLINE void accumulate(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// Bits of `ones` where `mask` has them, else of `zeros`.
INLINE __m512i choose_bits(int mask, __m512i ones, __m512i zeros) {
    return _mm512_ternarylogic_epi32(ones, _mm512_set1_epi8(char(mask)), zeros, 0xe2);
}

// Four sums += twos times what `index` finds in the table if bit `bit` of `which` is set. The branch is hidden from the compiler, which
// would keep two copies of the sums on its account.
INLINE void accumulate_some(__m512i sum[4], const __m512i index[4], const uint8_t* table, uint64_t which, int64_t bit, __m512i twos) {
    __m512i entries, found;
#define LOOK_UP(i, s) "vpermb %[entries], %[" #i "], %[found]\n\tvpdpbusd %[twos], %[found], %[" #s "]\n\t"
    asm("bt %[bit], %[which]\n\tjnc 1f\n\tvmovdqa64 (%[table]), %[entries]\n\t" LOOK_UP(i0, s0) LOOK_UP(i1, s1) LOOK_UP(i2, s2) LOOK_UP(i3, s3) "1:"
        : [s0] "+&v"(sum[0]), [s1] "+&v"(sum[1]), [s2] "+&v"(sum[2]), [s3] "+&v"(sum[3]), [entries] "=&v"(entries), [found] "=&v"(found)
        : [i0] "v"(index[0]), [i1] "v"(index[1]), [i2] "v"(index[2]), [i3] "v"(index[3]), [table] "r"(table), [which] "r"(which), [bit] "r"(bit), [twos] "v"(twos)
        : "cc", "memory");
#undef LOOK_UP
}

constexpr int64_t ONES = 0x0101010101010101;
constexpr int64_t BESIDE = 4;  // rows of sums side by side
constexpr int64_t LINES = 3;  // of the cache asked for with a block
constexpr int64_t BLOCKS = 32;  // of 16 operands (four words): head dims up to 512

// Lookup tables of up to BESIDE rows.
struct Tables {
    alignas(64) uint8_t entry[BLOCKS][BESIDE][64], excess[BLOCKS][BESIDE][64];
    uint64_t used, over[BESIDE];  // bit 2 i: block i has an operand that is not 0 in any row; an excess
    int32_t total[BESIDE];  // of |operand|

    // Operands of `height` words, of which some are negative or, as weights, none.
    template <bool SIGNED>
    void set(const int8_t* operands, int64_t stride, int64_t rows, int64_t height) {
        constexpr uint64_t FIRST = 0xaaaaaaaaaaaaaaaa, SECOND = 0xcccccccccccccccc;  // of two bits, the one that an operand needs
        const __m512i lane = _mm512_set_epi64(3 * ONES, 3 * ONES, 2 * ONES, 2 * ONES, ONES, ONES, 0, 0);
        const __m512i word = _mm512_add_epi8(lane, _mm512_broadcast_i32x4(_mm_set_epi64x(0x1818181810101010, 0x0808080800000000)));
        const __m512i near = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0302010003020100, 0x0302010003020100));
        const __m512i far = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0707070706060606, 0x0505050504040404));
        const __m512i all = _mm512_set1_epi8(char(255));
        uint64_t any = 0;
        for (int64_t r = 0; r < rows; ++r) {
            __m512i sums = _mm512_setzero_si512();
            uint64_t full = 0;
            for (int64_t k = 0; k < height; k += 16) {  // four blocks
                const int8_t* from = operands + r * stride + 4 * k;
                const __m512i x = height - k >= 16 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi32((1u << (height - k)) - 1, from);
                const __m512i plus = SIGNED ? _mm512_max_epi8(x, _mm512_setzero_si512()) : x, minus = _mm512_sub_epi8(plus, x);
                sums = _mm512_add_epi64(sums, _mm512_sad_epu8(SIGNED ? _mm512_abs_epi8(x) : x, _mm512_setzero_si512()));
                const uint64_t some = _mm512_test_epi64_mask(x, x);
                any |= ((some | some >> 1) & 0x55) << (k / 2);
                __m512i a[4], c[4], sum[4];
                UNROLL for (int half = 0; half < 2; ++half) {  // two blocks, eight bytes of a lane each: sums of operands 0 and 1, and of 2 and 3
                    const __m512i first = _mm512_add_epi8(word, _mm512_set1_epi8(char(32 * half))), second = _mm512_add_epi8(first, _mm512_set1_epi8(4));
                    __m512i pairs = _mm512_add_epi8(_mm512_maskz_permutexvar_epi8(FIRST, first, plus), _mm512_maskz_permutexvar_epi8(SECOND, second, plus));
                    if (SIGNED) {
                        pairs = _mm512_add_epi8(pairs, _mm512_maskz_permutexvar_epi8(~FIRST, first, minus));
                        pairs = _mm512_add_epi8(pairs, _mm512_maskz_permutexvar_epi8(~SECOND, second, minus));
                    }
                    UNROLL for (int b = 0; b < 2; ++b) {
                        const __m512i of_block = _mm512_set1_epi8(char(8 * b));
                        a[2 * half + b] = _mm512_shuffle_epi8(pairs, _mm512_or_si512(near, of_block)), c[2 * half + b] = _mm512_shuffle_epi8(pairs, _mm512_or_si512(far, of_block));
                    }
                }
                UNROLL for (int b = 0; b < 4; ++b) _mm512_store_si512(entry[k / 4 + b][r], sum[b] = _mm512_adds_epu8(a[b], c[b]));
                const __m512i most = _mm512_max_epu8(_mm512_max_epu8(sum[0], sum[1]), _mm512_max_epu8(sum[2], sum[3]));
                if (__builtin_expect(_mm512_cmpeq_epi8_mask(most, all) != 0, 0))  // one that is just as large has an excess of 0
                    UNROLL for (int b = 0; b < 4; ++b) {
                        if (!_mm512_cmpeq_epi8_mask(sum[b], all)) continue;
                        full |= uint64_t(1) << (k / 2 + 2 * b);
                        _mm512_store_si512(excess[k / 4 + b][r], _mm512_sub_epi8(_mm512_add_epi8(a[b], c[b]), sum[b]));
                    }
            }
            over[r] = full, total[r] = int32_t(_mm512_reduce_add_epi64(sums));
        }
        used = any;
    }
};

// What one register holds: sixteen words, of which a pass takes the even or the odd columns, or eight words twice and all columns.
enum Pass { EVEN, ODD, NARROW };
// The columns of a pass's four sums; of a narrow one those in the lower half, the upper half has column + 4.
constexpr int COLUMN[3][4] = {{0, 4, 2, 6}, {1, 5, 3, 7}, {0, 1, 2, 3}};

template <Pass PASS>
INLINE __m512i load_words(const uint8_t* words, __mmask16 lanes) {
    return PASS == NARROW ? _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)words)) : _mm512_maskz_loadu_epi32(lanes, words);
}

// Bits j and j + 1 of each byte of a pair of words: of bytes of `near` at even bits 0, 2, .. those of columns 0, 2, .. (odd: 1, 3, ..).
template <bool ODDS>
INLINE __m512i pair_bits(__m512i first, __m512i second) {
    return ODDS ? choose_bits(0xaa, second, _mm512_srli_epi32(first, 1)) : choose_bits(0xaa, _mm512_add_epi8(second, second), first);
}

// Four-bit numbers of the even or odd columns, bit i of each from word i of COUNT: of columns 0 and 4 (1 and 5) in the two halves of the
// bytes of `near`, of 2 and 6 (3 and 7) in those of `far`.
template <bool ODDS, int COUNT>
INLINE void gather(const __m512i word[4], __m512i& near, __m512i& far) {
    const __m512i none = _mm512_setzero_si512(), a = pair_bits<ODDS>(word[0], COUNT > 1 ? word[1] : none);
    near = a, far = _mm512_srli_epi32(a, 2);
    if (COUNT <= 2) return;
    const __m512i b = pair_bits<ODDS>(word[2], COUNT > 3 ? word[3] : none);
    near = choose_bits(0xcc, _mm512_slli_epi32(b, 2), near), far = choose_bits(0xcc, b, far);
}

// A matrix by which a product takes bits c of a byte in the lower half of a register, c + 4 in the upper half, to bits to[c], c < 4.
INLINE __m512i spread(const int (&to)[4]) {
    int64_t low = 0, high = 0;
    UNROLL for (int c = 0; c < 4; ++c) low |= int64_t(1) << (8 * (7 - to[c]) + c), high |= int64_t(1) << (8 * (7 - to[c]) + c + 4);
    return _mm512_set_epi64(high, high, high, high, low, low, low, low);
}
// By which a product turns a byte by two bits to the left.
constexpr int64_t TURN = 0x4080010204081020;

// Four-bit numbers of all columns of a narrow pass, one half's in the lower half: those of column 0 (4) in bits 0 to 3 of the bytes of `near`, of
// column 1 (5) in bits 4 to 7, of column 2 (6) in bits 2 to 5 of the bytes of `far`, of column 3 (7) in bits 6, 7, 0 and 1.
template <int COUNT>
INLINE void gather_narrow(const __m512i word[4], __m512i& near, __m512i& far) {
    auto moved = [&](int i, const int (&to)[4]) __attribute__((always_inline)) { return COUNT > i ? _mm512_gf2p8affine_epi64_epi8(word[i], spread(to), 0) : _mm512_setzero_si512(); };
    const __m512i a = _mm512_or_si512(moved(0, {0, 4, 2, 6}), moved(1, {1, 5, 3, 7})), b = _mm512_or_si512(moved(2, {2, 6, 4, 0}), moved(3, {3, 7, 5, 1}));
    near = choose_bits(0x33, a, b), far = choose_bits(0x33, b, a);
}

// The numbers of a pass's columns as bytes, with what `place` has in their upper bits.
template <Pass PASS, int COUNT>
INLINE void numbers(const __m512i word[4], __m512i place, __m512i to[4]) {
    const __m512i low = _mm512_set1_epi8(COUNT <= 2 ? 3 : 15);
    auto cut = [&](__m512i x) __attribute__((always_inline)) { return _mm512_ternarylogic_epi32(x, low, place, 0xea); };
    __m512i near, far;
    if (PASS == NARROW) {
        gather_narrow<COUNT>(word, near, far);
        to[0] = cut(near), to[1] = cut(_mm512_srli_epi32(near, 4)), to[2] = cut(_mm512_srli_epi32(far, 2)), to[3] = cut(_mm512_gf2p8affine_epi64_epi8(far, _mm512_set1_epi64(TURN), 0));
    } else {
        gather<PASS == ODD, COUNT>(word, near, far);
        to[0] = cut(near), to[1] = cut(_mm512_srli_epi32(near, 4)), to[2] = cut(far), to[3] = cut(_mm512_srli_epi32(far, 4));
    }
}

// Sums of one plane by lookups; asks for LINES lines from `fetch` on with each block.
template <int ROWS, Pass PASS>
INLINE void look_up(const Tables& tables, const uint8_t* words, int64_t height, int64_t width, __mmask16 lanes, __m512i sum[ROWS][4], const uint8_t* fetch) {
    const __m512i place = _mm512_set1_epi32(0x30201000), twos = _mm512_set1_epi8(2);
    __m512i index[4];
    auto look = [&](uint64_t left, __m512i to[4]) __attribute__((always_inline)) {
        const int64_t block = left ? __builtin_ctzll(left) / 2 : 0;
        __m512i word[4];
        UNROLL for (int k = 0; k < 4; ++k) {  // past the last word any will do: its operands are 0
            const int64_t row = 4 * block + k, last = height - 1;
            word[k] = load_words<PASS>(words + 4 * width * (row < last ? row : last), lanes);
        }
        numbers<PASS, 4>(word, place, to);
    };
    look(tables.used, index);
    for (uint64_t left = tables.used; left;) {
        const int64_t bit = __builtin_ctzll(left), block = bit / 2;
        left &= left - 1;
        __m512i next[4];
        look(left, next);
        UNROLL for (int i = 0; i < LINES; ++i) __builtin_prefetch(fetch + i * LINE_BYTES, 0, 2);
        fetch += LINES * LINE_BYTES;
        UNROLL for (int r = 0; r < ROWS; ++r) {
            const __m512i table = _mm512_load_si512(tables.entry[block][r]);
            UNROLL for (int c = 0; c < 4; ++c) accumulate(sum[r][c], _mm512_permutexvar_epi8(index[c], table), twos);
        }
        UNROLL for (int r = 0; r < ROWS; ++r) accumulate_some(sum[r], index, tables.excess[block][r], tables.over[r], bit, twos);
        UNROLL for (int c = 0; c < 4; ++c) index[c] = next[c];
    }
}

// Twice the sums of PLANES planes by products with their codes.
template <int ROWS, Pass PASS, int PLANES>
INLINE void multiply(const int8_t* operands, int64_t stride, const uint8_t* words, int64_t height, int64_t width, __mmask16 lanes, __m512i sum[ROWS][4], const uint8_t* fetch) {
    constexpr int64_t LINES = (PLANES / 2 + 1) * (PASS == NARROW ? 2 : 1);
    for (int64_t k = 0; k < height; ++k) {
        __m512i word[4], code[4];
        UNROLL for (int p = 0; p < PLANES; ++p) word[p] = load_words<PASS>(words + 4 * width * ((PLANES - 1 - p) * height + k), lanes);
        numbers<PASS, PLANES>(word, _mm512_setzero_si512(), code);
        UNROLL for (int i = 0; i < LINES; ++i) __builtin_prefetch(fetch + i * LINE_BYTES, 0, 2);
        fetch += LINES * LINE_BYTES;
        UNROLL for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, operands + r * stride + 4 * k, 4);
            const __m512i operand = _mm512_set1_epi32(four);
            UNROLL for (int c = 0; c < 4; ++c) accumulate(sum[r][c], code[c], operand);
        }
    }
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_add_epi32(sum[r][c], sum[r][c]);
}

// out = sum - less + (what was there << shift, nothing if shift is 0), for the columns of a pass.
template <int ROWS, Pass PASS>
INLINE void store_sums(const __m512i sum[ROWS][4], const int32_t less[ROWS], int shift, int64_t width, __mmask16 lanes, int32_t* out, int64_t out_stride) {
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int c = 0; c < 4; ++c) {
            const __m512i found = _mm512_sub_epi32(sum[r][c], _mm512_set1_epi32(less[r]));
            int32_t* to = out + r * out_stride + COLUMN[PASS][c] * width;
            auto put = [&](__mmask16 inside, __m512i x, int32_t* at) __attribute__((always_inline)) {
                if (shift) x = _mm512_add_epi32(x, _mm512_slli_epi32(_mm512_maskz_loadu_epi32(inside, at), unsigned(shift)));
                _mm512_mask_storeu_epi32(at, inside, x);
            };
            auto put_half = [&](__m256i x, __m256i* at) __attribute__((always_inline)) {
                if (shift) x = _mm256_add_epi32(x, _mm256_slli_epi32(_mm256_loadu_si256(at), unsigned(shift)));
                _mm256_storeu_si256(at, x);
            };
            if (PASS != NARROW) put(lanes, found, to);
            else put_half(_mm512_castsi512_si256(found), (__m256i*)to), put_half(_mm512_extracti64x4_epi64(found, 1), (__m256i*)(to + 4 * width));
        }
}

// Rows of operands int8 -127..127 [rows][4 height], prepared for dot products with any number of arrays of words.
class Operands {
public:
    // They must stay where they are.
    template <bool SIGNED>
    void set(int64_t planes, int64_t height, const int8_t* operands, int64_t stride, int64_t rows) {
        planes_ = planes, height_ = height, operands_ = operands, stride_ = stride, rows_ = rows;
        if (planes == 1) {
            Tables* tables = bitkv::room(tables_, (rows + BESIDE - 1) / BESIDE);
            for (int64_t r = 0; r < rows; r += BESIDE) tables[r / BESIDE].set<SIGNED>(operands + r * stride, stride, rows - r < BESIDE ? rows - r : BESIDE, height);
            return;
        }
        int32_t* total = bitkv::room(totals_, rows);
        for (int64_t r = 0; r < rows; ++r) {
            __m512i sum = _mm512_setzero_si512();
            for (int64_t k = 0; k < height; k += 16) {
                const __mmask16 inside = height - k >= 16 ? 0xffff : (1u << (height - k)) - 1;
                sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_maskz_loadu_epi32(inside, operands + r * stride + 4 * k));
            }
            total[r] = _mm512_reduce_add_epi32(sum);
        }
    }

    void dot(const uint8_t* words, int64_t width, int32_t* out, int64_t out_stride, Ahead& ahead) const {
        for (int64_t r = 0; r < rows_; r += BESIDE) {
            int32_t* to = out + r * out_stride;
            if (rows_ - r >= 4) dot_rows<4>(words, width, r, to, out_stride, ahead);
            else if (rows_ - r == 3) dot_rows<3>(words, width, r, to, out_stride, ahead);
            else if (rows_ - r == 2) dot_rows<2>(words, width, r, to, out_stride, ahead);
            else dot_rows<1>(words, width, r, to, out_stride, ahead);
        }
    }

private:
    template <int ROWS>
    void dot_rows(const uint8_t* words, int64_t width, int64_t row, int32_t* out, int64_t out_stride, Ahead& ahead) const {
        for (int64_t at = 0; at < width; at += 16) {
            if (width == 8) {
                dot_pass<ROWS, NARROW, false>(words, width, 0xff, row, out, out_stride, ahead);
                return;
            }
            const __mmask16 lanes = width - at >= 16 ? 0xffff : (1u << (width - at)) - 1;
            if (width == 16) {
                dot_pass<ROWS, EVEN, true>(words, width, lanes, row, out, out_stride, ahead);
                dot_pass<ROWS, ODD, true>(words, width, lanes, row, out, out_stride, ahead);
                return;
            }
            dot_pass<ROWS, EVEN, false>(words + 4 * at, width, lanes, row, out + at, out_stride, ahead);
            dot_pass<ROWS, ODD, false>(words + 4 * at, width, lanes, row, out + at, out_stride, ahead);
        }
    }

    // With constants for an array of 16 columns: what is stored with a mask is not soon there for a load.
    template <int ROWS, Pass PASS, bool SIXTEEN>
    __attribute__((noinline)) void dot_pass(const uint8_t* words, int64_t width, __mmask16 lanes, int64_t row, int32_t* out, int64_t out_stride, Ahead& ahead) const {
        if (SIXTEEN) width = 16, lanes = 0xffff;
        if (PASS == NARROW) width = 8;
        if (planes_ == 1) {
            const Tables& tables = tables_[size_t(row / BESIDE)];
            const uint8_t* fetch = ahead.take(LINES * __builtin_popcountll(tables.used), words);
            __m512i sum[ROWS][4] = {};
            look_up<ROWS, PASS>(tables, words, height_, width, lanes, sum, fetch);
            store_sums<ROWS, PASS>(sum, tables.total, 0, width, lanes, out, out_stride);
            return;
        }
        for (int64_t left = planes_; left > 0;) {  // the most significant planes first, as many as leave a multiple of four
            const int64_t here = (left - 1) % 4 + 1;
            const int shift = left == planes_ ? 0 : int(here);
            if (here == 4) dot_codes<ROWS, PASS, 4>(words, width, lanes, row, shift, out, out_stride, ahead);
            else if (here == 3) dot_codes<ROWS, PASS, 3>(words, width, lanes, row, shift, out, out_stride, ahead);
            else if (here == 2) dot_codes<ROWS, PASS, 2>(words, width, lanes, row, shift, out, out_stride, ahead);
            else dot_codes<ROWS, PASS, 1>(words, width, lanes, row, shift, out, out_stride, ahead);
            words += 4 * width * height_ * here, left -= here;
        }
    }

    template <int ROWS, Pass PASS, int PLANES>
    void dot_codes(const uint8_t* words, int64_t width, __mmask16 lanes, int64_t row, int shift, int32_t* out, int64_t out_stride, Ahead& ahead) const {
        const uint8_t* fetch = ahead.take((PLANES / 2 + 1) * (PASS == NARROW ? 2 : 1) * height_, words);
        __m512i sum[ROWS][4] = {};
        multiply<ROWS, PASS, PLANES>(operands_ + row * stride_, stride_, words, height_, width, lanes, sum, fetch);
        int32_t less[ROWS];
        UNROLL for (int r = 0; r < ROWS; ++r) less[r] = ((1 << PLANES) - 1) * totals_[size_t(row + r)];
        store_sums<ROWS, PASS>(sum, less, shift, width, lanes, out, out_stride);
    }

    int64_t planes_ = 0, height_ = 0, stride_ = 0, rows_ = 0;
    const int8_t* operands_ = nullptr;
    std::vector<Tables> tables_;
    bitkv::Room<int32_t> totals_;
};

}  // namespace
