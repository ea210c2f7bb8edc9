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

// Weights u.p of all pages and the largest of them, most [rows / FEW][pages], and masses; u.peak is the largest score of each row.
// Returns whether some peak is too far from its shift.
template <int V>
inline bool weigh_pages(const Layout& l, const Queries& q, float noise_factor, const Operands& keys, Unit& u, Each* most, Workspace& s, Ahead& ahead) {
    const int64_t P = l.tokens, pages = u.pages(), blocks = (u.rows + FEW - 1) / FEW;
    Factors* of_queries = query_factors(l, q, noise_factor, u, s);
    int32_t* levels = room(u.levels, u.rows * P);
    for (int64_t page = 0; page < pages; ++page) {
        keys.dot(u.record[page] + l.planes[KEYS], P / 8, levels, P, ahead);
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = block * FEW;
            Factors f = of_queries[block];
            with_rows(u.rows - first, [&](auto count) {
                for (int r = 0; r < count; ++r) f.base.row[r] = u.base[(first + r) * pages + page] - u.shift[first + r];
                const Weighed found = weigh_levels<V, count>(levels + first * P, P, f.scale, u.scales(l, KEYS, page), f.noise, f.base, u.scales(l, VALUES, page), &u.p[first * u.total + page * P], u.total, page == 0, &u.lanes[16 * first], ahead.take(V, u.record[page]));
                most[u.block(first, page)] = found.most, u.mass[u.block(first, page)] = found.sum;
            });
        }
    }
    find_peaks(u);
    bool far = false;
    for (int64_t row = 0; row < u.rows; ++row) far |= !(std::fabs(u.peak[row]) < 32.0f);
    for (int64_t row = 0; row < u.rows; row += FEW) store4(&u.peak[row], load4(&u.peak[row]) + load4(&u.shift[row]));
    return far;
}

// Scores, softmax and values of a unit. Partials m, l [rows], o [rows][D]. Powers count from a whole number that is known before the scores are, the
// first page's q.c, and in a second way, by the functions that refinement has, from next to the largest score, if some score is far from the first.
template <int V>
inline void attend_scanned(const Layout& l, const Queries& q, float noise_factor, const Operands& keys, Unit& u, Workspace& s, Ahead& ahead, float* m, float* l_out, float* o) {
    const int64_t P = l.tokens, pages = u.pages(), blocks = (u.rows + FEW - 1) / FEW;
    room(u.p, u.rows * u.total);
    base_scores(l, q, u, s);
    for (int64_t row = 0; row < u.rows; ++row) u.shift[row] = std::rint(u.base[row * pages]);
    Each* most = room(s.most, blocks * pages);
    if (weigh_pages<V>(l, q, noise_factor, keys, u, most, s, ahead)) {
        score_pages<V>(l, q, noise_factor, keys, u, s, ahead);
        soften<V>(l, u, room(s.log_sum_exp, u.rows), ahead);
        sum_scanned<V>(l, u, false, s, ahead);
    } else {
        int8_t* integers = room(s.integers, pages * u.rows * P);
        const float unit = level_unit(l.scan_bits[VALUES]);
        for (int64_t first = 0; first < u.rows; first += FEW)
            for (int64_t page = 0; page < pages; ++page) {
                const int64_t at = u.block(first, page);
                const Each size = quantize_rows<V>(std::min(FEW, u.rows - first), &u.p[first * u.total + page * P], u.total, most[at], integers + (page * u.rows + first) * P);
                u.size[at] = Each::of(size.all() * unit);
            }
        dot_values(l, u, integers, s, ahead);
    }
    std::copy_n(u.peak.data(), u.rows, m);
    for (int64_t first = 0; first < u.rows; first += FEW) {
        const Sixteen factors = exp2_fast(load16(&u.shift[first]) - load16(&u.peak[first]));
        const Four factor = __builtin_shufflevector(factors, factors, 0, 1, 2, 3);
        Four total = {};
        for (int64_t at = u.block(first, 0); at < u.block(first, pages); ++at) {
            u.size[at] = Each::of(u.size[at].all() * factor), u.mass[at] = Each::of(u.mass[at].all() * factor);
            total += u.mass[at].all();
        }
        for (int64_t r = 0; r < FEW && first + r < u.rows; ++r) l_out[first + r] = total[r];
    }
    combine<false>(l, u, o);
}

// What each page has of l, [rows][pages]; zero where none is sealed.
inline void tell_pages(const Layout& l, const Unit& u, const uint8_t* page_valid, float* to) {
    for (int64_t r = 0; r < u.rows; ++r)
        for (int64_t page = 0, held = 0; page < l.pages; ++page) to[r * l.pages + page] = page_valid[page] ? u.mass[u.block(r, held++)].row[r % FEW] : 0.0f;
}

// What a thread works with.
struct Own {
    Unit unit;
    Workspace workspace;
    Ahead ahead;
    std::vector<Operands> keys;
};

// `heads` KV heads from `head` on of some granules; partials [count][heads, Q, G]. Returns the tokens refined.
template <int V>
inline int64_t attend_pages(const Layout& l, const Queries& q, int64_t head, int64_t heads, const Granule* granules, int64_t count, int64_t page_stride, const Refinement& refine, PartialOut out, Own& own) {
    auto& [u, s, ahead, keys] = own;
    const int64_t rows = q.group;
    auto prepare = [&](Operands& to, int64_t of_head, int64_t query) {
        to.set<true>(l.scan_bits[KEYS], l.dim / 4, q.codes + (of_head * q.count + query) * rows * l.dim, l.dim, rows);
    };
    const bool once = q.count == 1;  // the same queries in all granules
    if (int64_t(keys.size()) < (once ? heads : 1)) keys.resize(size_t(once ? heads : 1));
    if (once && count)
        for (int64_t h = 0; h < heads; ++h) prepare(keys[size_t(h)], head + h, 0);
    int64_t refined = 0;
    if (count) ahead.scan(l, granules[0].records + head * l.record_bytes, page_stride);  // asked for at once by the next scan
    for (int64_t g = 0; g < count; ++g)
        for (int64_t h = 0; h < heads; ++h) {
            const uint8_t *valid = granules[g].page_valid, *records = granules[g].records + (head + h) * l.record_bytes, *next = nullptr;
            if (h + 1 < heads) next = records + l.record_bytes;
            else if (g + 1 < count) next = granules[g + 1].records + head * l.record_bytes;
            ahead.scan(l, next, page_stride);
            for (int64_t query = 0; query < q.count; ++query) {
                u.start(l, records, valid, page_stride, ((head + h) * q.count + query) * rows, rows);
                Operands& of_unit = keys[size_t(once ? h : 0)];
                if (!once) prepare(of_unit, head + h, query);
                const int64_t row = ((g * heads + h) * q.count + query) * rows;
                float *m = out.m + row, *l_out = out.l + row, *o = out.o + row * l.dim;
                if (u.total == 0) {
                    std::fill_n(m, rows, -INFINITY), std::fill_n(l_out, rows, 0.0f), std::fill_n(o, rows * l.dim, 0.0f);
                } else if (!refine.enabled) {
                    attend_scanned<V>(l, q, refine.scan_noise, of_unit, u, s, ahead, m, l_out, o);
                } else {
                    begin<V>(l, q, refine, of_unit, u, s, ahead);
                    finish<V>(l, q, refine, u, s, ahead, m, l_out, o);
                    refined += count_refined(u);
                }
                if (out.page_mass) tell_pages(l, u, valid, out.page_mass + row * l.pages);
            }
        }
    ahead.finish();
    return refined;
}

inline int64_t attend(const Layout& l, const Queries& q, int64_t head, int64_t heads, const Granule* granules, int64_t count, int64_t page_stride, const Refinement& refine, PartialOut out) {
    thread_local Own own;  // whose address takes a call to find
    const auto run = l.tokens == 64 ? attend_pages<4> : attend_pages<8>;
    return run(l, q, head, heads, granules, count, page_stride, refine, out, own);
}

}  // namespace
