// Twin of `select` in kernels/reference/selection.py: the tokens of one granule that carry its attention by their scanned scores.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#if defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

#include "numbers.hpp"
#include "room.hpp"

namespace {

// Order-preserving map of floats to integers; both zeros are one value.
inline SixteenInts ordered(Sixteen x) {
    const SixteenInts i = (SixteenInts)(x + 0.0f);
    return i ^ ((i >> 31) & 0x7fffffff);
}

// The keys that reach `low`, in order; returns how many. `to` has room for all and a register more.
inline int64_t reaching(const int32_t* keys, int64_t n, int32_t low, int32_t* to) {
    int64_t found = 0;
#if defined(__AVX512VBMI__)
    for (int64_t t = 0; t < n; t += 16) {
        const __m512i key = _mm512_loadu_si512(keys + t);
        const __mmask16 taken = _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(low));
        _mm512_storeu_si512(to + found, _mm512_maskz_compress_epi32(taken, key));
        found += __builtin_popcount(taken);
    }
#else
    for (int64_t t = 0; t < n; ++t) to[found] = keys[t], found += keys[t] >= low;
#endif
    return found;
}

// Ascending positions of the keys above `low` and of the first `ties` that equal it; `count` in all, and a bit of `taken` [n / 16] for each. `out` has
// room for a register more.
inline void collect(const int32_t* keys, int64_t n, int32_t low, int64_t ties, int64_t count, int32_t* out, uint16_t* taken) {
    int64_t found = 0;
#if defined(__AVX512VBMI__)
    const __m512i threshold = _mm512_set1_epi32(low);
    __m512i position = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t t = 0; t < n; t += 16, position = _mm512_add_epi32(position, _mm512_set1_epi32(16))) {
        const __m512i key = _mm512_loadu_si512(keys + t);
        uint32_t equal = _mm512_cmpeq_epi32_mask(key, threshold), here = _mm512_cmpgt_epi32_mask(key, threshold);
        for (; equal && ties; equal &= equal - 1, --ties) here |= equal & -equal;
        taken[t / 16] = uint16_t(here);
        const int64_t more = __builtin_popcount(here);
        _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi32(__mmask16(here), position));
        found += more;
    }
#else
    std::fill_n(taken, n / 16, uint16_t(0));
    for (int64_t t = 0; t < n && found < count; ++t) {
        if (keys[t] < low || (keys[t] == low && --ties < 0)) continue;
        out[found++] = int32_t(t), taken[t / 16] |= uint16_t(1 << t % 16);
    }
#endif
}

inline int64_t count_reaching(const int32_t* keys, int64_t n, int32_t low) {
#if defined(__AVX512VBMI__)
    const __m512i threshold = _mm512_set1_epi32(low);
    int64_t reached = 0, t = 0;
    for (; t + 16 <= n; t += 16) reached += __builtin_popcount(_mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys + t), threshold));
    const __mmask16 rest = __mmask16((1u << (n - t)) - 1);
    return reached + __builtin_popcount(_mm512_mask_cmpge_epi32_mask(rest, _mm512_maskz_loadu_epi32(rest, keys + t), threshold));
#else
    int32_t reached = 0;
    for (int64_t t = 0; t < n; ++t) reached += keys[t] >= low;
    return reached;
#endif
}

// Positions of the `count` largest of n keys, n a multiple of 16, ascending; ties go to the lower position. No sort: the keys are dealt to
// at least `count` hands, of whose largest the smallest is reached by as many; among those that reach it the threshold is found by bisection.
// `some` has room for n + 16; a bit of `taken` [n / 16] for each position.
inline void largest(const int32_t* keys, int64_t n, int64_t count, int32_t* some, int32_t* out, uint16_t* taken) {
    if (count <= 0) return void(std::fill_n(taken, n / 16, uint16_t(0)));
    const int64_t dealt = (count + 15) / 16, size = n / 16 / dealt;
    SixteenInts least = SixteenInts{} + INT32_MAX, most = load16(keys);
    for (int64_t first = 0, hand = 0; hand < dealt; ++hand) {
        const int64_t last = hand + 1 == dealt ? n : first + 16 * size;
        SixteenInts best = load16(keys + first);
        for (int64_t t = first + 16; t < last; t += 16) best = load16(keys + t) > best ? load16(keys + t) : best;
        least = best < least ? best : least;
        most = best > most ? best : most;
        first = last;
    }
    int32_t lowest = least[0], highest = most[0];
    for (int i = 1; i < 16; ++i) lowest = least[i] < lowest ? least[i] : lowest, highest = most[i] > highest ? most[i] : highest;
    const int64_t left = reaching(keys, n, lowest, some);
    int64_t low = lowest, high = highest;
    while (low < high) {  // the largest threshold that at least `count` keys reach
        const int64_t middle = low + (high - low + 1) / 2, reached = count_reaching(some, left, int32_t(middle));
        if (reached >= count) low = middle; else high = middle - 1;
        if (reached == count) break;
    }
    const int64_t above = low == INT32_MAX ? 0 : count_reaching(some, left, int32_t(low) + 1);
    collect(keys, n, int32_t(low), count - above, count, out, taken);
}

// scores [rows][total] -> ascending positions of the `count` tokens to refine: one list for all rows of a group, whose log-sum-exp
// [rows] inside the granule are given, else a list per row; `taken` [lists][total / 16] has a bit for each. positions: and room for 16 more; keys, some: room for `total` and `total` + 16.
inline void select(int64_t rows, int64_t total, const float* scores, const float* log_sum_exp, bool group, int64_t count, int32_t* keys, int32_t* some, int32_t* positions, uint16_t* taken) {
    if (!group || rows == 1) {
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t t = 0; t < total; t += 16) store16(keys + t, ordered(load16(scores + r * total + t)));
            largest(keys, total, count, some, positions + r * count, taken + r * (total / 16));
        }
        return;
    }
    for (int64_t t = 0; t < total; t += 16) {
        Sixteen rank = load16(scores + t) - log_sum_exp[0];
        for (int64_t r = 1; r < rows; ++r) rank = larger(load16(scores + r * total + t) - log_sum_exp[r], rank);
        store16(keys + t, ordered(rank));
    }
    largest(keys, total, count, some, positions, taken);
}

}  // namespace
