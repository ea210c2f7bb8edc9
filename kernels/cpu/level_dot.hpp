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

// out[r][j W + i] = plane * sum over k, b of operands[r][4 k + b] * (+1 or -1) + 2 * what was there (nothing before the first plane).
inline void add_plane(const uint8_t* words, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, bool first, int32_t* out, int64_t out_stride) {
    for (int64_t r = 0; r < rows; ++r) {
        int32_t *to = out + r * out_stride, total = 0;
        for (int64_t k = 0; k < 4 * height; ++k) total += operands[r * stride + k];
        for (int64_t i = 0; i < 8 * width; ++i) to[i] = (first ? 0 : 2 * to[i]) - total;
        for (int64_t k = 0; k < height; ++k)
            for (int b = 0; b < 4; ++b) {
                const int32_t factor = 2 * operands[r * stride + 4 * k + b];
                if (!factor) continue;
                const uint8_t* bytes = words + 4 * k * width + b;
                for (int j = 0; j < 8; ++j)
                    for (int64_t i = 0; i < width; ++i) to[j * width + i] += ((bytes[4 * i] >> j) & 1) * factor;
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
