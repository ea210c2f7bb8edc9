// Twin of `select` in kernels/reference/selection.py: the tokens of one granule that carry its attention by their scanned scores.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.hpp"

namespace {

// Makes room for n values, of which none is kept.
template <class T>
inline T* room(std::vector<T>& v, int64_t n) {
    if (int64_t(v.size()) < n) v.resize(size_t(n));
    return v.data();
}

// Order-preserving map of floats to integers; both zeros are one value.
inline int32_t ordered(float x) {
    const int32_t i = bits_of(x + 0.0f);
    return i ^ ((i >> 31) & 0x7fffffff);
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
    int32_t above = 0;
    for (int64_t t = 0; t < n; ++t) above += keys[t] > low;
    int64_t ties = count - above;
    for (int64_t t = 0, found = 0; found < count; ++t) {
        if (keys[t] < low || (keys[t] == low && --ties < 0)) continue;
        out[found++] = int32_t(t);
    }
}

// scores [rows][total] -> ascending positions of the `count` tokens to refine: one list for all rows of a group, else a list per row.
inline void select(int64_t rows, int64_t total, const float* scores, bool group, int64_t count, int32_t* positions) {
    thread_local std::vector<float> ranks, weights;
    thread_local std::vector<int32_t> ordered_ranks;
    int32_t* keys = room(ordered_ranks, total);
    if (!group || rows == 1) {
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t t = 0; t < total; ++t) keys[t] = ordered(scores[r * total + t]);
            largest(keys, total, count, positions + r * count);
        }
        return;
    }
    float *p = room(weights, total), *rank = room(ranks, total);
    for (int64_t r = 0; r < rows; ++r) {
        const float* score = scores + r * total;
        const float peak = max16(score, total);
        exp2_shifted(score, peak, total, p);
        const float log_sum_exp = peak + std::log2(sum16(p, total));
        if (r == 0) for (int64_t t = 0; t < total; ++t) rank[t] = score[t] - log_sum_exp;
        else for (int64_t t = 0; t < total; ++t) rank[t] = score[t] - log_sum_exp > rank[t] ? score[t] - log_sum_exp : rank[t];
    }
    for (int64_t t = 0; t < total; ++t) keys[t] = ordered(rank[t]);
    largest(keys, total, count, positions);
}

}  // namespace
