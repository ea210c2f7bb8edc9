// Partials: their merge (twin of bitkv_dist/partial.py), and attention to rows in floating point (twin of `attend_dense`).
#pragma once
#include <cmath>
#include <cstring>
#include <vector>

#include "numbers.hpp"

namespace {

// Merge of partials (bitkv_dist/partial.py) into the first; an empty side is passed over without arithmetic.
inline void merge(int64_t rows, int64_t dim, float* m, float* l, float* o, const float* m2, const float* l2, const float* o2) {
    for (int64_t r = 0; r < rows; ++r) {
        if (m2[r] == -INFINITY) {
            if (m[r] == -INFINITY) {
                l[r] = 0.0f;
                std::memset(o + r * dim, 0, dim * sizeof(float));
            }
        } else if (m[r] == -INFINITY) {
            m[r] = m2[r], l[r] = l2[r];
            std::memcpy(o + r * dim, o2 + r * dim, dim * sizeof(float));
        } else {
            const float peak = m[r] > m2[r] ? m[r] : m2[r];
            const float less = exp2_fast(-std::fabs(m[r] - m2[r])), a = m[r] < m2[r] ? less : 1.0f, b = m[r] < m2[r] ? 1.0f : less;
            m[r] = m[r] != m[r] || m2[r] != m2[r] ? NAN : peak;
            l[r] = l[r] * a + l2[r] * b;
            float* to = o + r * dim;
            const float* from = o2 + r * dim;
            int64_t d = 0;
            for (; d + 16 <= dim; d += 16) store16(to + d, load16(to + d) * a + load16(from + d) * b);
            for (; d < dim; ++d) to[d] = to[d] * a + from[d] * b;
        }
    }
}

inline void attend_exact(int64_t dim, int64_t count, int64_t row_stride, const float* q, const float* k, const float* v, float* m, float* l, float* o) {
    thread_local std::vector<float> p, product;
    std::memset(o, 0, dim * sizeof(float));
    *m = -INFINITY, *l = 0.0f;
    if (count == 0) return;
    p.resize(count), product.resize(dim);
    for (int64_t t = 0; t < count; ++t) {
        for (int64_t d = 0; d < dim; ++d) product[d] = q[d] * k[t * row_stride + d];
        p[t] = sum16(product.data(), dim);
    }
    *m = max16(p.data(), count);
    const float peak = *m;
    for (int64_t t = 0; t < count; ++t) p[t] = exp2_fast(p[t] - peak);
    *l = sum16(p.data(), count);
    if (*l != *l) *m = NAN;  // not empty
    for (int64_t t = 0; t < count; ++t)
        for (int64_t d = 0; d < dim; ++d) o[d] += p[t] * v[t * row_stride + d];
}

}  // namespace
