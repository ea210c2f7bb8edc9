// Twin of `attend` in kernels/reference/attention.py: scan, select, refine, softmax, values.
// The integers are the reference's; sums of floats have one fixed order, so nothing depends on threads or on other granules.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "ahead.hpp"
#include "interface.hpp"
#include "numbers.hpp"
#include "rotate.hpp"
#include "scores.hpp"
#include "values.hpp"
#include "weigh.hpp"

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

// Scores, softmax and values of a unit. Partials m, l [rows], o [rows][D].
template <int V>
inline void attend_scanned(const Layout& l, const Queries& q, float noise_factor, const Operands& keys, Unit& u, Workspace& s, Ahead& ahead, float* m, float* l_out, float* o) {
    const int64_t P = l.tokens, pages = u.pages();
    score_pages<V>(l, q, noise_factor, keys, u, s, ahead);
    std::copy_n(u.peak.data(), u.rows, m);
    int8_t* integers = room(s.integers, pages * u.rows * P);
    const float unit = level_unit(l.scan_bits[VALUES]);
    for (int64_t first = 0; first < u.rows; first += FEW) {
        const Each rounder = rounders(u, first);
        Each factor;
        for (int64_t r = 0; r < FEW; ++r) factor.row[r] = exp2_fast(u.shift(first + r) - u.peak[first + r]);
        Four total = {};
        with_rows(u.rows - first, [&](auto count) {
            Each* most = room(s.most, pages);
            for (int64_t page = 0; page < pages; ++page) {
                float* rows = &u.scores[first * u.total + page * P];
                const Weighed found = soften_rows<V, count, true>(rows, u.total, rounder, u.scales(l, VALUES, page), rows);
                most[page] = found.most;
                u.mass[u.block(first, page)] = Each::of(found.sum.all() * factor.all()), total += u.mass[u.block(first, page)].all();
            }
            for (int64_t page = 0; page < pages; ++page) {
                const Each size = quantize_rows<V>(count, &u.scores[first * u.total + page * P], u.total, most[page], integers + (page * u.rows + first) * P);
                u.size[u.block(first, page)] = Each::of(size.all() * factor.all() * unit);
            }
            for (int r = 0; r < count; ++r) l_out[first + r] = total[r];
        });
    }
    dot_values(l, u, integers, s, ahead);
    combine<false>(l, u, o);
}

// What each page has of l, [rows][pages]; zero where none is sealed.
inline void tell_pages(const Layout& l, const Unit& u, const uint8_t* page_valid, float* to) {
    for (int64_t r = 0; r < u.rows; ++r)
        for (int64_t page = 0, held = 0; page < l.pages; ++page) to[r * l.pages + page] = page_valid[page] ? u.mass[u.block(r, held++)].row[r % FEW] : 0.0f;
}

// `heads` KV heads from `head` on of some granules; partials [count][heads, Q, G]. Returns the
// tokens refined.
template <int V>
inline int64_t attend_pages(const Layout& l, const Queries& q, int64_t head, int64_t heads, const Granule* granules, int64_t count, int64_t page_stride, const Refinement& refine, PartialOut out) {
    struct Own {
        Unit unit;
        Workspace workspace;
        Ahead ahead;
        std::vector<Operands> keys;
    };
    thread_local Own of_thread;
    auto& [u, s, ahead, keys] = of_thread;
    const int64_t rows = q.group, per_granule = heads * q.count, all = count * per_granule;
    auto prepare = [&](Operands& to, int64_t unit) { to.set<true>(l.scan_bits[KEYS], l.dim / 4, q.codes + (head * q.count + unit) * rows * l.dim, l.dim, rows); };
    const bool once = q.count == 1;  // the same queries in all granules
    if (int64_t(keys.size()) < (once ? heads : 1)) keys.resize(size_t(once ? heads : 1));
    if (once && count)
        for (int64_t h = 0; h < heads; ++h) prepare(keys[size_t(h)], h);
    auto records = [&](int64_t i) { return granules[i / per_granule].records + (head + i % per_granule / q.count) * l.record_bytes; };
    int64_t refined = 0;
    for (int64_t i = 0; i < all; ++i) {
        if (i % q.count == 0) ahead.scan(l, i + q.count < all ? records(i + q.count) : nullptr, page_stride);
        const int64_t unit = i % per_granule;
        const uint8_t* valid = granules[i / per_granule].page_valid;
        u.start(l, records(i), valid, page_stride, (head * q.count + unit) * rows, rows);
        Operands& of_unit = keys[size_t(once ? unit : 0)];
        if (!once) prepare(of_unit, unit);
        float *m = out.m + i * rows, *l_out = out.l + i * rows, *o = out.o + i * rows * l.dim;
        if (u.total == 0) {
            std::fill_n(m, rows, -INFINITY), std::fill_n(l_out, rows, 0.0f), std::fill_n(o, rows * l.dim, 0.0f);
        } else if (!refine.enabled) {
            attend_scanned<V>(l, q, refine.scan_noise, of_unit, u, s, ahead, m, l_out, o);
        } else {
            begin<V>(l, q, refine, of_unit, u, s, ahead);
            finish<V>(l, q, refine, u, s, ahead, m, l_out, o);
            refined += count_refined(u);
        }
        if (out.page_mass) tell_pages(l, u, valid, out.page_mass + i * rows * l.pages);
    }
    ahead.finish();
    return refined;
}

inline int64_t attend(const Layout& l, const Queries& q, int64_t head, int64_t heads, const Granule* granules, int64_t count, int64_t page_stride, const Refinement& refine, PartialOut out) {
    const auto run = l.tokens == 64 ? attend_pages<4> : attend_pages<8>;
    return run(l, q, head, heads, granules, count, page_stride, refine, out);
}

}  // namespace
