// Twin of `encode` in kernels/reference, bit for bit: the same operations in the same order, no fused multiply-add.
#pragma once
#include <cstring>
#include <vector>

#include "interface.hpp"
#include "numbers.hpp"
#include "rotate.hpp"

namespace {

using namespace bitkv;

constexpr int64_t LANES = 16;  // tokens coded side by side

// Tree of adjacent pairs over `rows` rows of LANES floats, zero-padded to a power of two; destroys x, the result is its first row.
inline void tree_sum(float* x, int64_t rows) {
    while (rows > 1) {
        const int64_t half = rows / 2;
        for (int64_t i = 0; i < half; ++i)
            for (int64_t t = 0; t < LANES; ++t) x[i * LANES + t] = x[2 * i * LANES + t] + x[(2 * i + 1) * LANES + t];
        if (rows % 2)
            for (int64_t t = 0; t < LANES; ++t) x[half * LANES + t] = x[(rows - 1) * LANES + t] + 0.0f;
        rows = (rows + 1) / 2;
    }
}

// from [rows][columns] -> to [columns][rows], in blocks that stay in the cache; sizes are multiples of 8.
template <class T>
inline void transpose(const T* from, int64_t rows, int64_t columns, T* to) {
    for (int64_t row = 0; row < rows; row += 8)
        for (int64_t column = 0; column < columns; column += 8)
            for (int64_t i = 0; i < 8; ++i)
                for (int64_t j = 0; j < 8; ++j) to[(column + i) * rows + row + j] = from[(row + j) * columns + column + i];
}

struct Scratch {
    std::vector<float> z, work, level;
    std::vector<uint8_t> code;
    Scratch(int64_t tokens, int64_t dim) : z(tokens * dim), work(dim * LANES), level(dim * LANES), code(tokens * dim) {}
};

// cell = floor(z / scale) between low and high, the IEEE-rounded quotient as in the reference; scale 0 counts as 1. The product with the
// reciprocal is within 2^-22 of that quotient, relatively: below 340 in size it gives the same cell unless it lies within 2^-13 of an
// integer, and then its neighbourhood is divided. Larger ones are cut off either way.
inline void cells(const float* z, int64_t dim, const float* scale, float low, float high, float* cell) {
    float step[LANES], inverse_of[LANES], nearest[LANES];
    for (int64_t t = 0; t < LANES; ++t) step[t] = scale[t] == 0.0f ? 1.0f : scale[t], inverse_of[t] = 1.0f / step[t];
    const Sixteen zero = {}, least = zero + low, most = zero + high;
    Sixteen inverse;
    std::memcpy(&inverse, inverse_of, sizeof inverse);
    for (int64_t first = 0; first < dim; first += 8) {
        const float* x = z + first * LANES;
        float* to = cell + first * LANES;
        Sixteen closest = zero + 1.0f;
        for (int64_t d = 0; d < 8; ++d) {
            Sixteen y;
            std::memcpy(&y, x + d * LANES, sizeof y);
            y = y * inverse;
            const Sixteen whole = (y + ROUNDER) - ROUNDER, above = y - whole, below = whole - y;
            const Sixteen away = above > below ? above : below;
            closest = away < closest ? away : closest;
            Sixteen c = whole > y ? whole - 1.0f : whole;
            c = c < least ? least : c;
            c = c > most ? most : c;
            std::memcpy(to + d * LANES, &c, sizeof c);
        }
        std::memcpy(nearest, &closest, sizeof closest);
        int32_t near = 0;
        for (int64_t t = 0; t < LANES; ++t) near |= nearest[t] < 0x1p-13f;
        if (!near) continue;
        for (int64_t d = 0; d < 8; ++d)
            for (int64_t t = 0; t < LANES; ++t) {
                float c = std::floor(x[d * LANES + t] / step[t]);
                c = c < low ? low : c;
                to[d * LANES + t] = c > high ? high : c;
            }
    }
}

// Sixteen vectors z [D][LANES] -> codes [D][LANES], and the stored scales (full, scan) as halves.
inline void quantize(const float* z, int64_t dim, int64_t bits, int64_t scan_bits, bool unbiased, Scratch& s, uint8_t* code, uint16_t* full, uint16_t* scan) {
    float* work = s.work.data();
    float peak[LANES] = {}, total[LANES], square[LANES];
    for (int64_t i = 0; i < dim * LANES; ++i) work[i] = std::fabs(z[i]);
    for (int64_t d = 0; d < dim; ++d)
        for (int64_t t = 0; t < LANES; ++t) peak[t] = work[d * LANES + t] > peak[t] ? work[d * LANES + t] : peak[t];
    tree_sum(work, dim);
    for (int64_t t = 0; t < LANES; ++t) total[t] = work[t];
    if (unbiased) {
        for (int64_t i = 0; i < dim * LANES; ++i) work[i] = z[i] * z[i];
        tree_sum(work, dim);
        for (int64_t t = 0; t < LANES; ++t) square[t] = work[t];
    }
    if (bits == 1) {
        for (int64_t i = 0; i < dim * LANES; ++i) code[i] = z[i] >= 0.0f;
        for (int64_t t = 0; t < LANES; ++t) full[t] = float_to_half(clamp_half(total[t] / float(dim)));
    } else {
        const float half_range = ((1 << bits) - 1) / 2.0f, low = -float(1 << (bits - 1)), high = float((1 << (bits - 1)) - 1);
        float best[LANES], scale[LANES], best_scale[LANES] = {};
        for (int f = 0; f < 17; ++f) {
            const float factor = float((40 + 5 * f) / 100.0);
            for (int64_t t = 0; t < LANES; ++t) scale[t] = half_to_float(float_to_half(clamp_half(peak[t] * factor / half_range)));
            cells(z, dim, scale, low, high, s.level.data());
            for (int64_t d = 0; d < dim; ++d)
                for (int64_t t = 0; t < LANES; ++t) {
                    const float error = (s.level[d * LANES + t] + 0.5f) * scale[t] - z[d * LANES + t];
                    work[d * LANES + t] = error * error;
                }
            tree_sum(work, dim);
            for (int64_t t = 0; t < LANES; ++t) {
                const bool better = f == 0 || work[t] < best[t];
                best[t] = better ? work[t] : best[t];
                best_scale[t] = better ? scale[t] : best_scale[t];
            }
        }
        cells(z, dim, best_scale, low, high, s.level.data());
        for (int64_t t = 0; t < LANES; ++t) full[t] = float_to_half(best_scale[t]);
        for (int64_t i = 0; i < dim * LANES; ++i) code[i] = uint8_t(int(s.level[i]) + (1 << (bits - 1)));
    }
    if (scan_bits == bits && !unbiased) {
        std::memcpy(scan, full, LANES * 2);
        return;
    }
    if (scan_bits == 1) {
        for (int64_t t = 0; t < LANES; ++t)
            scan[t] = float_to_half(clamp_half(!unbiased ? total[t] / float(dim) : total[t] == 0.0f ? 0.0f : square[t] / total[t]));
    } else {
        const float middle = ((1 << scan_bits) - 1) / 2.0f;
        float cross[LANES];
        for (int64_t i = 0; i < dim * LANES; ++i) {
            s.level[i] = float(code[i] >> (bits - scan_bits)) - middle;
            work[i] = z[i] * s.level[i];
        }
        tree_sum(work, dim);
        for (int64_t t = 0; t < LANES; ++t) cross[t] = work[t];
        for (int64_t i = 0; i < dim * LANES; ++i) work[i] = s.level[i] * s.level[i];
        tree_sum(work, dim);
        for (int64_t t = 0; t < LANES; ++t)
            scan[t] = float_to_half(clamp_half(!unbiased ? cross[t] / work[t] : cross[t] == 0.0f ? 0.0f : square[t] / cross[t]));
    }
    if (scan_bits == bits) std::memcpy(full, scan, LANES * 2);
}

// Byte i = bit `shift` of codes[i + step * j] in its bit j, for i < step.
inline void gather_bits(const uint8_t* codes, int64_t step, int64_t shift, uint8_t* bytes) {
    for (int64_t i = 0; i < step; ++i) bytes[i] = 0;
    for (int64_t j = 0; j < 8; ++j)
        for (int64_t i = 0; i < step; ++i) bytes[i] |= uint8_t(((codes[j * step + i] >> shift) & 1) << j);
}

// One plane: `rows` rows of 8 * width codes (keys: dims of P tokens, values: tokens of D dims) -> words [rows / 4][width], four rows a word.
inline void pack_plane(const uint8_t* codes, int64_t rows, int64_t width, int64_t shift, uint8_t* out) {
    uint8_t bytes[4][64];
    for (int64_t row = 0; row < rows; row += 4, out += 4 * width) {
        for (int64_t b = 0; b < 4; ++b) gather_bits(codes + (row + b) * 8 * width, width, shift, bytes[b]);
        for (int64_t i = 0; i < width; ++i)
            for (int64_t b = 0; b < 4; ++b) out[4 * i + b] = bytes[b][i];
    }
}

// The low bits, token-major: codes [P][D].
inline void pack_low(const uint8_t* codes, int64_t tokens, int64_t dim, int64_t low_bits, uint8_t* out) {
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t shift = low_bits - 1; shift >= 0; --shift)
            for (int64_t d = 0; d < dim; d += 8) {
                uint64_t eight;
                std::memcpy(&eight, codes + t * dim + d, 8);
                eight = (eight >> shift) & 0x0101010101010101u;
                *out++ = uint8_t((eight * 0x0102040810204080u) >> 56);  // bit 8 d -> bit d
            }
}

// x fp32 [P, D] of one page and KV head -> that side's fields of its record.
inline void encode(const Layout& l, Side side, const float* x, const float* signs, int64_t unbiased, uint8_t* record) {
    const int64_t P = l.tokens, D = l.dim;
    Scratch s(P, D);
    float* z = s.z.data();
    transpose(x, P, D, z);
    rotate(D, P, z, signs);
    uint16_t* centroid = reinterpret_cast<uint16_t*>(record + l.centroid[side]);
    std::vector<float> row(P);
    for (int64_t d = 0; d < D; ++d) {
        std::memcpy(row.data(), z + d * P, P * sizeof(float));
        for (int64_t n = P; n > 1; n /= 2)
            for (int64_t i = 0; i < n / 2; ++i) row[i] = row[2 * i] + row[2 * i + 1];
        centroid[d] = float_to_half(clamp_half(row[0] / float(P)));
        const float c = half_to_float(centroid[d]);
        for (int64_t t = 0; t < P; ++t) z[d * P + t] -= c;
    }
    std::vector<float> block(D * LANES);
    std::vector<uint8_t> codes(D * LANES);
    uint16_t full[LANES], scan[LANES];
    for (int64_t first = 0; first < P; first += LANES) {
        for (int64_t d = 0; d < D; ++d) std::memcpy(&block[d * LANES], z + d * P + first, LANES * sizeof(float));
        quantize(block.data(), D, l.bits[side], l.scan_bits[side], unbiased, s, codes.data(), full, scan);
        for (int64_t d = 0; d < D; ++d) std::memcpy(&s.code[d * P + first], &codes[d * LANES], LANES);
        std::memcpy(record + l.scan[side] + 2 * first, scan, sizeof scan);
        if (l.scan_bits[side] < l.bits[side]) std::memcpy(record + l.full[side] + 2 * first, full, sizeof full);
    }
    std::vector<uint8_t> by_token(P * D);
    transpose(s.code.data(), D, P, by_token.data());
    const int64_t low_bits = l.bits[side] - l.scan_bits[side];
    for (int64_t plane = 0; plane < l.scan_bits[side]; ++plane) {
        const int64_t shift = l.bits[side] - 1 - plane;
        uint8_t* out = record + l.planes[side] + plane * (P * D / 8);
        if (side == KEYS) pack_plane(s.code.data(), D, P / 8, shift, out);
        else pack_plane(by_token.data(), P, D / 8, shift, out);
    }
    if (low_bits) pack_low(by_token.data(), P, D, low_bits, record + l.low[side]);
}

}  // namespace
