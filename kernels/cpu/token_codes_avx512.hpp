// Codes of single tokens with AVX-512 VBMI, VNNI and GFNI.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "ahead.hpp"
#include "level_dot_avx512.hpp"

namespace {

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

// Planes of up to 64 bytes in all, for a dim of 64 or 128, as codes in DIM / 64 registers: eight bits of each plane are rows of a matrix of
// 8 x 8 bits, and the codes of eight dims its columns. A product with single bits picks them. Up to 64 bytes around a token's are read: a
// record has centroids behind its low bits, and planes before them.
template <int DIM>
class Columns {
public:
    explicit Columns(int64_t planes) : bytes_(planes * DIM / 8), used_(0x0101010101010101u * uint8_t(0xff00 >> planes)) {  // the last row is the lowest bit
        const __m512i row = _mm512_set1_epi64(0x0706050403020100), octet = _mm512_set_epi64(7 * ONES, 6 * ONES, 5 * ONES, 4 * ONES, 3 * ONES, 2 * ONES, ONES, 0);
        const __m512i plane = _mm512_maskz_sub_epi8(used_, row, _mm512_set1_epi8(char(8 - planes)));
        from_ = _mm512_add_epi8(octet, _mm512_slli_epi16(plane, DIM == 128 ? 4 : 3)), column_ = _mm512_set1_epi64(int64_t(0x8040201008040201));
    }

    INLINE void read(const uint8_t* first, __m512i code[DIM / 64]) const {
        // A register from the token's first byte on would often touch a line more, which nobody has asked for, masked or not. Which tokens lie
        // in one line nobody can foresee: no branch.
        const int64_t into = int64_t(uintptr_t(first) % LINE_BYTES), back = into & (into + bytes_ - LINE_BYTES - 1) >> 63;
        const __m512i bits = _mm512_loadu_si512(first - back), place = _mm512_add_epi8(from_, _mm512_set1_epi8(char(back)));
        UNROLL for (int half = 0; half < DIM / 64; ++half)
            code[half] = _mm512_gf2p8affine_epi64_epi8(column_, _mm512_maskz_permutexvar_epi8(used_, _mm512_add_epi8(place, _mm512_set1_epi8(char(8 * half))), bits), 0);
    }

private:
    int64_t bytes_;
    __mmask64 used_;
    __m512i from_, column_;
};

// A token's bits of a plane of values, which stand in one line for a dim of 64 or 128: adds `one` to the codes that have them set.
template <int DIM>
class TopBits {
public:
    TopBits() {
        const __m512i lane = _mm512_set_epi64(0x3f3e3d3c3b3a3938, 0x3736353433323130, 0x2f2e2d2c2b2a2928, 0x2726252423222120, 0x1f1e1d1c1b1a1918, 0x1716151413121110, 0x0f0e0d0c0b0a0908, 0x0706050403020100);
        place_ = _mm512_and_si512(_mm512_slli_epi32(lane, 2), _mm512_set1_epi8(0x3c));
    }

    INLINE void add(const uint8_t* words, int64_t token, __m512i one, __m512i code[DIM / 64]) const {
        const __m512i place = _mm512_or_si512(place_, _mm512_set1_epi8(char(token % 4)));
        const uint8_t* line = words + token / 4 * (DIM / 2);
        if (DIM == 64) {  // eight words: the byte of lane i is that of dims i % 8 + 8 j, of which this lane has j = i / 8
            const __m512i bytes = _mm512_permutexvar_epi8(place, _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)line)));
            const __m512i which = _mm512_set_epi64(int64_t(128u * uint64_t(ONES)), 64 * ONES, 32 * ONES, 16 * ONES, 8 * ONES, 4 * ONES, 2 * ONES, ONES);
            code[0] = _mm512_mask_add_epi8(code[0], _mm512_test_epi8_mask(bytes, which), code[0], one);
            return;
        }
        const __m512i bytes = _mm512_permutexvar_epi8(place, _mm512_loadu_si512(line));  // sixteen words, four j to a register
        UNROLL for (int half = 0; half < DIM / 64; ++half) {
            auto j = [&](int bit) __attribute__((always_inline)) { return int64_t(uint64_t(ONES) << (4 * half + bit)); };
            code[half] = _mm512_mask_add_epi8(code[half], _mm512_test_epi8_mask(bytes, _mm512_set_epi64(j(3), j(3), j(2), j(2), j(1), j(1), j(0), j(0))), code[half], one);
        }
    }

private:
    __m512i place_;
};

// Sums of the lanes of four registers.
inline __m128i sum_lanes(const __m512i x[4]) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}

inline void code_sums(const int8_t* operands, int64_t rows, int64_t dim, int32_t* out) {
    for (int64_t r = 0; r < rows; ++r, operands += dim) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t d = 0; d < dim; d += 64) {
            const __mmask64 inside = dim - d >= 64 ? ~0ull : (1ull << (dim - d)) - 1;
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_maskz_loadu_epi8(inside, operands + d));
        }
        out[r] = _mm512_reduce_add_epi32(sum);
    }
}

// out[r][i] = sum over d of operands[r][d] times codes of token i, four tokens at a time: of `out` up to three past the last are written.
template <int ROWS, int DIM, class At>
inline void dot_columns(int64_t count, const At& at, int64_t planes, const int8_t* operands, int32_t* out, int64_t out_stride) {
    const Columns<DIM> columns(planes);
    for (int64_t i = 0; i < count; i += 4) {
        __m512i sum[ROWS][4] = {};
        UNROLL for (int t = 0; t < 4; ++t) {
            __m512i code[DIM / 64];
            columns.read(at(i + t < count ? i + t : i), code);
            UNROLL for (int r = 0; r < ROWS; ++r)
                UNROLL for (int half = 0; half < DIM / 64; ++half) sum[r][t] = _mm512_dpbusd_epi32(sum[r][t], code[half], _mm512_loadu_si512(operands + r * DIM + 64 * half));
        }
        UNROLL for (int r = 0; r < ROWS; ++r) _mm_storeu_si128((__m128i*)(out + r * out_stride + i), sum_lanes(sum[r]));
    }
}

template <int ROWS, class At>
inline void dot_tokens(int64_t count, const At& at, int64_t planes, int64_t dim, const int8_t* operands, int32_t* out, int64_t out_stride, uint8_t* room) {
    if (dim == 64) return dot_columns<ROWS, 64>(count, at, planes, operands, out, out_stride);
    if (dim == 128 && planes <= 4) return dot_columns<ROWS, 128>(count, at, planes, operands, out, out_stride);
    for (int64_t i = 0; i < count; ++i) {
        read_row(at(i), planes, dim, room);
        for (int r = 0; r < ROWS; ++r) {
            __m512i sum = _mm512_setzero_si512();
            for (int64_t d = 0; d < dim; d += 64) {
                const __mmask64 inside = dim - d >= 64 ? ~0ull : (1ull << (dim - d)) - 1;
                sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(room + d), _mm512_maskz_loadu_epi8(inside, operands + r * dim + d));
            }
            out[r * out_stride + i] = _mm512_reduce_add_epi32(sum);
        }
    }
}

template <class At>
inline void token_dots(int64_t count, const At& at, int64_t planes, int64_t dim, const int8_t* operands, int64_t rows, int32_t* out, int64_t out_stride, uint8_t* room) {
    for (; rows >= 4; rows -= 4, operands += 4 * dim, out += 4 * out_stride) dot_tokens<4>(count, at, planes, dim, operands, out, out_stride, room);
    if (rows == 3) dot_tokens<3>(count, at, planes, dim, operands, out, out_stride, room);
    else if (rows == 2) dot_tokens<2>(count, at, planes, dim, operands, out, out_stride, room);
    else if (rows == 1) dot_tokens<1>(count, at, planes, dim, operands, out, out_stride, room);
}

template <int DIM, class Low, class Words, class Token>
inline void value_columns(int64_t count, const Low& low_at, int64_t low, const Words& words_at, const Token& token_at, int64_t scan, int64_t plane_bytes, uint8_t* codes) {
    const Columns<DIM> columns(low);
    const TopBits<DIM> top;
    for (int64_t i = 0; i < count; ++i) {
        __m512i code[DIM / 64];
        columns.read(low_at(i), code);
        for (int64_t plane = 0; plane < scan; ++plane) top.add(words_at(i) + plane * plane_bytes, token_at(i), _mm512_set1_epi8(char(1 << (low + scan - 1 - plane))), code);
        UNROLL for (int half = 0; half < DIM / 64; ++half) _mm512_storeu_si512(codes + i * DIM + 64 * half, code[half]);
    }
}

template <class Low, class Words, class Token>
inline void value_codes(int64_t count, const Low& low_at, int64_t low, const Words& words_at, const Token& token_at, int64_t scan, int64_t plane_bytes, int64_t dim, uint8_t* codes) {
    if (dim == 64) return value_columns<64>(count, low_at, low, words_at, token_at, scan, plane_bytes, codes);
    if (dim == 128 && low <= 4) return value_columns<128>(count, low_at, low, words_at, token_at, scan, plane_bytes, codes);
    for (int64_t i = 0; i < count; ++i, codes += code_stride(dim)) {
        read_row(low_at(i), low, dim, codes);
        for (int64_t plane = 0; plane < scan; ++plane) add_bits(words_at(i) + plane * plane_bytes, dim, token_at(i), 1 << (low + scan - 1 - plane), codes);
    }
}

// run(0), .. run(N - 1) with constants. Loops that are unrolled by a pragma may be too large to be unrolled before arrays become registers.
template <class Run, int... I>
INLINE void repeat(const Run& run, std::integer_sequence<int, I...>) { (run(std::integral_constant<int, I>()), ...); }

// Sums of four tokens' weights times 64 of their codes, and of the weights alone.
template <int ROWS>
INLINE void accumulate_four(const __m512i code[4], const int8_t* weights, int64_t stride, uint32_t inside, __m512i sum[ROWS][4], __m512i total[ROWS]) {
    const __m512i low01 = _mm512_unpacklo_epi8(code[0], code[1]), high01 = _mm512_unpackhi_epi8(code[0], code[1]);
    const __m512i low23 = _mm512_unpacklo_epi8(code[2], code[3]), high23 = _mm512_unpackhi_epi8(code[2], code[3]);
    const __m512i four[4] = {_mm512_unpacklo_epi16(low01, low23), _mm512_unpackhi_epi16(low01, low23), _mm512_unpacklo_epi16(high01, high23), _mm512_unpackhi_epi16(high01, high23)};
    repeat([&](auto r) __attribute__((always_inline)) {
        uint32_t weight;
        std::memcpy(&weight, weights + r * stride, 4);
        const __m512i operand = _mm512_set1_epi32(int(weight & inside));
        accumulate(sum[r][0], four[0], operand), accumulate(sum[r][1], four[1], operand), accumulate(sum[r][2], four[2], operand), accumulate(sum[r][3], four[3], operand);
        accumulate(total[r], _mm512_set1_epi8(1), operand);
    }, std::make_integer_sequence<int, ROWS>());
}

template <int ROWS, bool WHOLE>
inline void add_sums(const uint8_t* codes, int64_t count, int64_t dim, const int8_t* weights, int64_t stride, const float* size, int64_t bits, float* out) {
    // Lanes of 16 bytes hold dims 0..3 of their sixteen last, so that dwords come out in order when bytes of four tokens are woven.
    const __m512i weave = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), most = _mm512_set1_epi32((1 << bits) - 1);
    const int64_t next = code_stride(dim), last = (count - 1) / 4 * 4;
    for (int64_t d = 0; d < dim; d += 64) {
        __m512i sum[ROWS][4], total[ROWS], code[4];
        repeat([&](auto r) __attribute__((always_inline)) { total[r] = sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = _mm512_setzero_si512(); }, std::make_integer_sequence<int, ROWS>());
        const uint8_t* from = codes + d;
        for (int64_t i = 0; i < last; i += 4, from += 4 * next) {
            UNROLL for (int b = 0; b < 4; ++b) code[b] = _mm512_permutexvar_epi32(weave, _mm512_loadu_si512(from + b * next));
            accumulate_four<ROWS>(code, weights + i, stride, ~0u, sum, total);
        }
        // Past the last token any codes will do.
        UNROLL for (int b = 0; b < 4; ++b) code[b] = _mm512_permutexvar_epi32(weave, _mm512_loadu_si512(from + (last + b < count ? b * next : 0)));
        accumulate_four<ROWS>(code, weights + last, stride, ~0u >> 8 * (last + 4 - count), sum, total);
        __mmask16 inside[4];  // a load waits longer for what was stored with a mask
        UNROLL for (int v = 0; v < 4; ++v) inside[v] = WHOLE || dim - d >= 16 * (v + 1) ? 0xffff : (1u << std::max<int64_t>(dim - d - 16 * v, 0)) - 1;
        repeat([&](auto row) __attribute__((always_inline)) {
            constexpr int r = row;
            const __m512i less = _mm512_mullo_epi32(total[r], most);
            const __m512 by = _mm512_set1_ps(size[r]);
            float* to = out + r * dim + d;
            repeat([&](auto v) __attribute__((always_inline)) {
                const __m512 found = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(sum[r][v], sum[r][v]), less));
                if (WHOLE) _mm512_storeu_ps(to + 16 * v, _mm512_fmadd_ps(found, by, _mm512_loadu_ps(to + 16 * v)));
                else _mm512_mask_storeu_ps(to + 16 * v, inside[v], _mm512_fmadd_ps(found, by, _mm512_maskz_loadu_ps(inside[v], to + 16 * v)));
            }, std::make_integer_sequence<int, 4>());
        }, std::make_integer_sequence<int, ROWS>());
    }
}

inline void add_token_sums(const uint8_t* codes, int64_t count, int64_t dim, const int8_t* weights, int64_t stride, int64_t rows, const float* size, int64_t bits, float* out) {
    with_rows(rows, [&](auto some) {
        if (dim % 64 == 0) add_sums<some, true>(codes, count, dim, weights, stride, size, bits, out);
        else add_sums<some, false>(codes, count, dim, weights, stride, size, bits, out);
    });
}

}  // namespace
