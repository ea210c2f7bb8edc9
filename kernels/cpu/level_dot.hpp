// The integer core: bytes times the levels that bit planes stand for. One primitive serves keys (words [D/4][P/8], operands = query
// codes) and values (words [P/4][D/8], operands = token weights); bit 8 b + j of words[k][i] belongs to operand 4 k + b and output
// j W + i. The level of a code of S planes is the odd integer 2 code - (2^S - 1), which is the sum over its planes of +-2^(S-1-s).
#pragma once
#include <cstdint>
#include <cstring>

#include "ahead.hpp"

#if defined(__AVX512VBMI__)
#include "level_dot_avx512.hpp"
#elif defined(__AVX2__)
#include "level_dot_avx2.hpp"
#else

namespace {

// Registers of 128 bits, which every processor of today has; compilers turn the operators into its instructions.
typedef int16_t EightShorts __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));

// Up to four words from `from` on, zeros after them.
inline EightShorts load_words(const uint8_t* from, int64_t count) {
    EightShorts x = {};
    if (count >= 4) std::memcpy(&x, from, 16);
    else std::memcpy(&x, from, size_t(4 * count));
    return x;
}

constexpr int64_t WORDS = 128;  // of four operands, of which sums stay within 16 bits: head dims up to 512

// Four operands in two pairs of 16 bits.
struct Pairs {
    int32_t even, odd;
    static int32_t pair(int8_t low, int8_t high) { return int32_t(uint32_t(uint16_t(low)) | uint32_t(uint16_t(high)) << 16); }
};

// Columns j and j + 1 of four words, ROWS rows: out = 2 * out (nothing if `first`) + the sum of operands times +-1. A mask of 16 bits, all or none of
// them set by one bit of a word, keeps an operand or not.
template <int ROWS>
inline void add_columns(const uint8_t* words, int64_t height, int64_t width, int64_t at, int j, const Pairs (*operands)[WORDS], const int32_t* total, bool first, int32_t* out, int64_t out_stride) {
    const int64_t count = width - at;
    EightShorts sum[ROWS][2] = {};
    for (int64_t k = 0; k < height; ++k) {
        const EightShorts x = load_words(words + 4 * (k * width + at), count);
        EightShorts even[ROWS], odd[ROWS];
        for (int r = 0; r < ROWS; ++r) even[r] = (EightShorts)(FourInts{} + operands[r][k].even), odd[r] = (EightShorts)(FourInts{} + operands[r][k].odd);
        for (int c = 0; c < 2; ++c) {
            const int16_t low_bit = int16_t(1 << (j + c)), high_bit = int16_t(uint16_t(256 << (j + c)));
            const EightShorts low = EightShorts{} + low_bit, high = EightShorts{} + high_bit;
            const EightShorts in_low = (x & low) == low, in_high = (x & high) == high;
            for (int r = 0; r < ROWS; ++r) sum[r][c] += (in_low & even[r]) + (in_high & odd[r]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 2; ++c) {
            const FourInts pairs = (FourInts)sum[r][c], found = 2 * ((pairs << 16 >> 16) + (pairs >> 16)) - total[r];
            int32_t* to = out + r * out_stride + (j + c) * width + at;
            for (int64_t i = 0; i < 4 && i < count; ++i) to[i] = (first ? 0 : 2 * to[i]) + found[i];
        }
}

inline void add_plane(const uint8_t* words, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, bool first, int32_t* out, int64_t out_stride) {
    for (; rows > 0; rows -= 4, operands += 4 * stride, out += 4 * out_stride) {
        Pairs pairs[4][WORDS];
        int32_t total[4] = {};
        for (int r = 0; r < 4 && r < rows; ++r)
            for (int64_t k = 0; k < height; ++k) {
                const int8_t* four = operands + r * stride + 4 * k;
                pairs[r][k] = {Pairs::pair(four[0], four[2]), Pairs::pair(four[1], four[3])}, total[r] += four[0] + four[1] + four[2] + four[3];
            }
        for (int64_t at = 0; at < width; at += 4)
            for (int j = 0; j < 8; j += 2) {
                if (rows >= 4) add_columns<4>(words, height, width, at, j, pairs, total, first, out, out_stride);
                else if (rows == 3) add_columns<3>(words, height, width, at, j, pairs, total, first, out, out_stride);
                else if (rows == 2) add_columns<2>(words, height, width, at, j, pairs, total, first, out, out_stride);
                else add_columns<1>(words, height, width, at, j, pairs, total, first, out, out_stride);
            }
    }
}

}  // namespace

#endif

#if !defined(__AVX512VBMI__)

namespace {

// Rows of operands int8 -127..127 [rows][4 height], for dot products with any number of arrays of words; they must stay where they are.
class Operands {
public:
    template <bool>
    void set(int64_t planes, int64_t height, const int8_t* operands, int64_t stride, int64_t rows) {
        planes_ = planes, height_ = height, operands_ = operands, stride_ = stride, rows_ = rows;
    }

    // out int32 [rows][8 W]: sums of operands times levels; planes one after the other, the most significant first. Strides between rows in
    // bytes (operands) and elements (out). Nothing but `out` needs to be aligned.
    void dot(const uint8_t* words, int64_t width, int32_t* out, int64_t out_stride, Ahead&) const {
        for (int64_t plane = 0; plane < planes_; ++plane)
            add_plane(words + plane * 4 * height_ * width, height_, width, operands_, stride_, rows_, plane == 0, out, out_stride);
    }

private:
    int64_t planes_ = 0, height_ = 0, stride_ = 0, rows_ = 0;
    const int8_t* operands_ = nullptr;
};

}  // namespace

#endif
