// The rotation R = (H_{2^a} (x) Q_m) diag(signs) and its inverse, in the order of operations of kernels/reference.
// `lanes` vectors are transformed side by side: x is [D][lanes].
#pragma once
#include <cmath>
#include <cstdint>

namespace {

struct SmallDct {
    int64_t m;
    float q[7][7];
    explicit SmallDct(int64_t size) : m(size) {
        const double pi = 3.14159265358979323846;
        for (int64_t k = 0; k < m; ++k)
            for (int64_t j = 0; j < m; ++j) q[k][j] = float(std::sqrt((k ? 2.0 : 1.0) / m) * std::cos(pi * (j + 0.5) * k / m));
    }
};

inline void small_matmul(const SmallDct& dct, bool transposed, int64_t size, int64_t lanes, float* x) {
    float sum[7];
    for (int64_t i = 0; i < size; ++i) {
        float* block = x + i * dct.m * lanes;
        for (int64_t t = 0; t < lanes; ++t) {
            for (int64_t k = 0; k < dct.m; ++k) {
                sum[k] = block[t] * (transposed ? dct.q[0][k] : dct.q[k][0]);
                for (int64_t j = 1; j < dct.m; ++j) sum[k] = sum[k] + block[j * lanes + t] * (transposed ? dct.q[j][k] : dct.q[k][j]);
            }
            for (int64_t k = 0; k < dct.m; ++k) block[k * lanes + t] = sum[k];
        }
    }
}

inline void hadamard(int64_t size, int64_t width, float* x) {  // x [size][width]
    for (int64_t stride = 1; stride < size; stride *= 2)
        for (int64_t block = 0; block < size; block += 2 * stride) {
            float* a = x + block * width;
            float* b = a + stride * width;
            for (int64_t i = 0; i < stride * width; ++i) {
                const float u = a[i], v = b[i];
                a[i] = u + v;
                b[i] = u - v;
            }
        }
    const float scale = float(1.0 / std::sqrt(double(size)));
    for (int64_t i = 0; i < size * width; ++i) x[i] *= scale;
}

inline void rotate(int64_t dim, int64_t lanes, float* x, const float* signs) {
    const int64_t size = dim & -dim;
    const SmallDct dct(dim / size);
    for (int64_t d = 0; d < dim; ++d)
        for (int64_t t = 0; t < lanes; ++t) x[d * lanes + t] *= signs[d];
    if (dct.m > 1) small_matmul(dct, false, size, lanes, x);
    hadamard(size, dct.m * lanes, x);
}

inline void rotate_back(int64_t dim, float* z, const float* signs) {
    const int64_t size = dim & -dim;
    const SmallDct dct(dim / size);
    hadamard(size, dct.m, z);
    if (dct.m > 1) small_matmul(dct, true, size, 1, z);
    for (int64_t d = 0; d < dim; ++d) z[d] *= signs[d];
}

}  // namespace
