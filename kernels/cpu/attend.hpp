// Twin of `attend` in kernels/reference/attention.py: scan, select, refine, softmax, values.
// The integers are the reference's; sums of floats have one fixed order, so nothing depends on threads or on other granules.
#pragma once
#include <cstring>
#include <vector>

#include "ahead.hpp"
#include "interface.hpp"
#include "numbers.hpp"
#include "rotate.hpp"
#include "scores.hpp"
#include "values.hpp"

namespace {

using namespace bitkv;

inline void quantize_query(int64_t dim, const float* q, const float* signs, int8_t* codes, float* scale, float* norm2, float* rotated) {
    std::memcpy(rotated, q, size_t(dim) * sizeof(float));
    rotate(dim, 1, rotated, signs);
    float peak = 0.0f;
    for (int64_t d = 0; d < dim; ++d) peak = std::fabs(rotated[d]) > peak ? std::fabs(rotated[d]) : peak;
    const float divisor = peak == 0.0f ? 1.0f : peak;
    std::vector<float> square(dim);
    for (int64_t d = 0; d < dim; ++d) {
        codes[d] = int8_t(round_int(127.0f * rotated[d] / divisor));
        square[d] = rotated[d] * rotated[d];
    }
    *scale = peak / 127.0f;
    *norm2 = fold_sum(square.data(), dim);
}

// `heads` KV heads of a granule from `head` on. With refinement a unit is finished after the next was begun.
inline int64_t attend(const Layout& l, const Queries& q, int64_t head, int64_t heads, const Granule& granule, const Refinement& refine, PartialOut out) {
    struct Own {
        Unit units[2];
        Workspace workspace;
        Ahead ahead;
    };
    thread_local Own of_thread;
    Own& own = of_thread;
    auto& [units, s, ahead] = own;
    const int64_t rows = q.group, count = heads * q.count;
    int64_t refined = 0;
    auto end = [&](int64_t i) {
        refined += finish(l, q, refine, own.units[i % 2], own.workspace, own.ahead, out.m + i * rows, out.l + i * rows, out.o + i * rows * l.dim);
    };
    for (int64_t i = 0; i < count; ++i) {
        const int64_t offset = i / q.count;
        if (i % q.count == 0)
            ahead.scan(l, offset + 1 < heads ? granule.records + (offset + 1) * l.record_bytes : granule.next, granule.page_stride);
        const Granule view = {granule.records + offset * l.record_bytes, nullptr, granule.page_stride, granule.page_valid};
        begin(l, q, refine, view, (head * q.count + i) * rows, units[i % 2], s, ahead);
        if (!refine.enabled) end(i);
        else if (i) end(i - 1);
    }
    if (refine.enabled && count) end(count - 1);
    ahead.finish();
    return refined;
}

}  // namespace
