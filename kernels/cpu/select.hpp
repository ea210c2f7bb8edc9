// Twin of `select` in kernels/reference/selection.py: the tokens of one granule that carry its attention by their scanned scores.
#pragma once
#include <cmath>
#include <cstdint>
#if defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

#include "numbers.hpp"
#include "unit.hpp"

namespace {

// Order-preserving map of floats to integers; both zeros are one value.
inline int32_t ordered(float x) {
    const int32_t i = bits_of(x + 0.0f);
    return i ^ ((i >> 31) & 0x7fffffff);
}

// Ascending positions of the keys above `low` and of the first `ties` that equal it; `count` in all.
inline void collect(const int32_t* keys, int64_t n, int32_t low, int64_t ties, int64_t count, int32_t* out) {
    int64_t t = 0, found = 0;
#if defined(__AVX512VBMI__)
    const __m512i threshold = _mm512_set1_epi32(low);
    __m512i position = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; t + 16 <= n; t += 16, position = _mm512_add_epi32(position, _mm512_set1_epi32(16))) {
        const __m512i key = _mm512_loadu_si512(keys + t);
        uint32_t equal = _mm512_cmpeq_epi32_mask(key, threshold), taken = _mm512_cmpgt_epi32_mask(key, threshold);
        for (; equal && ties; equal &= equal - 1, --ties) taken |= equal & -equal;
        if (!taken) continue;
        const int64_t here = __builtin_popcount(taken);
        _mm512_mask_storeu_epi32(out + found, (1u << here) - 1, _mm512_maskz_compress_epi32(__mmask16(taken), position));
        found += here;
    }
#endif
    for (; t < n && found < count; ++t) {
        if (keys[t] < low || (keys[t] == low && --ties < 0)) continue;
        out[found++] = int32_t(t);
    }
}

// Positions of the `count` largest of n keys, ascending; ties go to the lower position. No sort: bisection on the value.
inline void largest(const int32_t* keys, int64_t n, int64_t count, int32_t* out) {
    if (count <= 0) return;
    int32_t least = keys[0], most = keys[0];
    for (int64_t t = 1; t < n; ++t) least = keys[t] < least ? keys[t] : least, most = keys[t] > most ? keys[t] : most;
    int64_t low = least, high = most;
    while (low < high) {  // the largest threshold that at least `count` keys reach
        const int64_t middle = low + (high - low + 1) / 2;
        const int32_t threshold = int32_t(middle);
        int32_t reached = 0;
        for (int64_t t = 0; t < n; ++t) reached += keys[t] >= threshold;
        if (reached >= count) low = middle; else high = middle - 1;
        if (reached == count) break;
    }
    const int32_t threshold = int32_t(low);
    int32_t above = 0;
    for (int64_t t = 0; t < n; ++t) above += keys[t] > threshold;
    collect(keys, n, threshold, count - above, count, out);
}

// scores [rows][total] -> ascending positions of the `count` tokens to refine: one list for all rows of a group, else a list per row.
// A group also leaves its rows' largest scores in `peak` and 2^(score - peak) in p [rows][total]; true if it did.
inline bool select(int64_t rows, int64_t total, const float* scores, bool group, int64_t count, int32_t* positions, float* peak, float* p, Workspace& s) {
    int32_t* keys = room(s.keys, total);
    if (!group || rows == 1) {
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t t = 0; t < total; ++t) keys[t] = ordered(scores[r * total + t]);
            largest(keys, total, count, positions + r * count);
        }
        return false;
    }
    float* rank = room(s.ranks, total);
    for (int64_t r = 0; r < rows; ++r) {
        const float* score = scores + r * total;
        peak[r] = max16(score, total);
        const float log_sum_exp = peak[r] + std::log2(exp2_shifted(score, peak[r], total, p + r * total));
        if (r == 0) for (int64_t t = 0; t < total; ++t) rank[t] = score[t] - log_sum_exp;
        else for (int64_t t = 0; t < total; ++t) rank[t] = score[t] - log_sum_exp > rank[t] ? score[t] - log_sum_exp : rank[t];
    }
    for (int64_t t = 0; t < total; ++t) keys[t] = ordered(rank[t]);
    largest(keys, total, count, positions);
    return true;
}

}  // namespace
