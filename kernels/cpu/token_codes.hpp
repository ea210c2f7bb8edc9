// Codes of single tokens as bytes, for those few that refinement picks: the top bits come out of the interleaved words of their page, the
// low bits are stored as rows of D / 8 bytes, one per plane, the most significant first, dim d in bit d % 8 of byte d / 8.
#pragma once
#include <cstdint>
#include <cstring>

#include "interface.hpp"
#include "level_dot.hpp"
#include "weigh.hpp"

namespace {

using namespace bitkv;

// Bytes from one token's codes to the next: whole registers, zeros past the last dim.
inline int64_t code_stride(int64_t dim) { return (dim + 63) / 64 * 64; }

// codes[d] += one where a plane of values (words [P/4][D/8]) has the bit of a token set.
inline void add_bits(const uint8_t* words, int64_t dim, int64_t token, int one, uint8_t* codes) {
    const int64_t width = dim / 8;
    const uint8_t* bytes = words + token / 4 * 4 * width + token % 4;
    for (int64_t j = 0; j < 8; ++j)
        for (int64_t i = 0; i < width; ++i) codes[j * width + i] = uint8_t(codes[j * width + i] + ((bytes[4 * i] >> j) & 1) * one);
}

}  // namespace

#if defined(__AVX512VBMI__)
#include "token_codes_avx512.hpp"
#else

namespace {

inline void read_row(const uint8_t* bits, int64_t planes, int64_t dim, uint8_t* codes) {
    std::memset(codes, 0, size_t(code_stride(dim)));
    for (int64_t p = 0; p < planes; ++p)
        for (int64_t d = 0; d < dim; ++d) codes[d] = uint8_t(2 * codes[d] + ((bits[p * (dim / 8) + d / 8] >> (d % 8)) & 1));
}

// out[r][i] = sum over d of operands[r][d] times the code of dim d of token i, whose `planes` begin at at(i); up to three past the last of
// `out` are written. `room`: for one token's codes.
template <class At>
inline void token_dots(int64_t count, const At& at, int64_t planes, int64_t dim, const int8_t* operands, int64_t rows, int32_t* out, int64_t out_stride, uint8_t* room) {
    for (int64_t i = 0; i < count; ++i) {
        read_row(at(i), planes, dim, room);
        for (int64_t r = 0; r < rows; ++r) {
            int32_t sum = 0;
            for (int64_t d = 0; d < dim; ++d) sum += room[d] * operands[r * dim + d];
            out[r * out_stride + i] = sum;
        }
    }
}

// Sums of the operands of each row.
inline void code_sums(const int8_t* operands, int64_t rows, int64_t dim, int32_t* out) {
    for (int64_t r = 0; r < rows; ++r, operands += dim) {
        out[r] = 0;
        for (int64_t d = 0; d < dim; ++d) out[r] += operands[d];
    }
}

// codes[i] = those of token i: `low` planes begin at low_at(i), `scan` planes of words, plane_bytes apart, at words_at(i) for all tokens of its
// page, of which it is token_at(i).
template <class Low, class Words, class Token>
inline void value_codes(int64_t count, const Low& low_at, int64_t low, const Words& words_at, const Token& token_at, int64_t scan, int64_t plane_bytes, int64_t dim, uint8_t* codes) {
    for (int64_t i = 0; i < count; ++i, codes += code_stride(dim)) {
        read_row(low_at(i), low, dim, codes);
        for (int64_t plane = 0; plane < scan; ++plane) add_bits(words_at(i) + plane * plane_bytes, dim, token_at(i), 1 << (low + scan - 1 - plane), codes);
    }
}

// out[r][d] += size[r] times the sum over `count` tokens of weights[r][i] (0..127) times the levels of codes[i][d], up to four rows; three
// weights past the last can be read.
inline void add_token_sums(const uint8_t* codes, int64_t count, int64_t dim, const int8_t* weights, int64_t stride, int64_t rows, const float* size, int64_t bits, float* out) {
    for (int64_t r = 0; r < rows; ++r) {
        int32_t total = 0;
        for (int64_t i = 0; i < count; ++i) total += weights[r * stride + i];
        for (int64_t d = 0; d < dim; ++d) {
            int32_t sum = 0;
            for (int64_t i = 0; i < count; ++i) sum += codes[i * code_stride(dim) + d] * weights[r * stride + i];
            out[r * dim + d] += float(2 * sum - ((1 << bits) - 1) * total) * size[r];
        }
    }
}

}  // namespace

#endif
