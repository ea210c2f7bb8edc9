// Scores of scanned keys, and which tokens are to be refined.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ahead.hpp"
#include "select.hpp"
#include "unit.hpp"
#include "weigh.hpp"

namespace {

// q.c of some rows; `centroid` in halves.
template <int COUNT>
inline Each centroid_products(const float* q, const uint8_t* centroid, int64_t rows) {
    Sixteen c[COUNT];
    UNROLLED for (int i = 0; i < COUNT; ++i) c[i] = load_halves(centroid + 32 * i);
    return with_rows(rows, [&](auto count) {
        constexpr int ROWS = count;
        Sixteen sum[FEW] = {};
        UNROLLED for (int r = 0; r < ROWS; ++r) sum[r] = product_of(q + r * 16 * COUNT, c);
        return Each::of(fold16(sum));
    });
}

inline Each centroid_scores(const float* q, const uint8_t* centroid, int64_t dim, int64_t rows, Workspace& s) {
    if (dim == 128) return centroid_products<8>(q, centroid, rows);
    if (dim == 64) return centroid_products<4>(q, centroid, rows);
    Each found = {};
    float *product = room(s.product, 2 * dim), *c = product + dim;
    halves_to_floats(centroid, dim, c);
    for (int64_t r = 0; r < rows; ++r, q += dim) {
        for (int64_t d = 0; d < dim; ++d) product[d] = q[d] * c[d];
        found.row[r] = fold_sum(product, dim);
    }
    return found;
}

// q.c of four pages whose centroids are 64 numbers, all of which the registers hold: base [rows][4].
inline void centroid_scores_of_four(const Layout& l, const float* q, const Unit& u, float* base) {
    Sixteen c[4][4];
    UNROLLED for (int page = 0; page < 4; ++page)
        UNROLLED for (int i = 0; i < 4; ++i) c[page][i] = load_halves(u.centroid(l, KEYS, page) + 32 * i);
    for (int64_t r = 0; r < u.rows; ++r, q += 64, base += 4) {
        Sixteen sum[4];
        UNROLLED for (int page = 0; page < 4; ++page) sum[page] = product_of(q, c[page]);
        store4(base, fold16(sum));
    }
}

// q.c of all pages.
inline void base_scores(const Layout& l, const Queries& q, Unit& u, Workspace& s) {
    if (l.dim == 64 && u.pages() == 4) return centroid_scores_of_four(l, q.rotated + u.first * l.dim, u, u.base.data());
    for (int64_t first = 0; first < u.rows; first += FEW)
        for (int64_t page = 0; page < u.pages(); ++page) {
            const int64_t rows = std::min(FEW, u.rows - first);
            const Each found = centroid_scores(q.rotated + (u.first + first) * l.dim, u.centroid(l, KEYS, page), l.dim, rows, s);
            for (int64_t r = 0; r < rows; ++r) u.base[(first + r) * u.pages() + page] = found.row[r];
        }
}

// Of a page; what belongs to the queries was found before. A unit of the levels of one half can be taken into the scale: that rounds nothing.
inline Factors factors(const Unit& u, int64_t page, int64_t first, int64_t rows, const Factors& of_queries) {
    Factors found = of_queries;
    for (int64_t r = 0; r < rows; ++r) found.base.row[r] = u.base[(first + r) * u.pages() + page];
    return found;
}

// Of the queries, [rows / FEW].
inline Factors* query_factors(const Layout& l, const Queries& q, float noise_factor, const Unit& u, Workspace& s) {
    Factors* found = room(s.factors, (u.rows + FEW - 1) / FEW);
    for (int64_t r = 0; r < u.rows; ++r) {
        found[r / FEW].scale.row[r % FEW] = q.scale[u.first + r] * level_unit(l.scan_bits[KEYS]);
        found[r / FEW].noise.row[r % FEW] = q.norm2[u.first + r] * noise_factor;
    }
    return found;
}

// The largest score of each row from those of its lanes.
inline void find_peaks(Unit& u) {
    for (int64_t first = 0; first < u.rows; first += FEW) {
        Sixteen lanes[FEW];
        UNROLLED for (int r = 0; r < FEW; ++r) lanes[r] = load16(&u.lanes[16 * (first + r)]);
        store4(&u.peak[first], most16(lanes));
    }
}

// Scores of all tokens, and the largest of each row. What a row's reductions wait for is long done when all pages are through.
template <int V>
inline void score_pages(const Layout& l, const Queries& q, float noise_factor, const Operands& keys, Unit& u, Workspace& s, Ahead& ahead) {
    room(u.levels, u.rows * u.total), room(u.scores, u.rows * u.total);
    base_scores(l, q, u, s);
    Factors* of_queries = query_factors(l, q, noise_factor, u, s);
    for (int64_t page = 0; page < u.pages(); ++page) {
        keys.dot(u.record[page] + l.planes[KEYS], l.tokens / 8, &u.levels[page * l.tokens], u.total, ahead);
        for (int64_t first = 0; first < u.rows; first += FEW) {
            const int64_t rows = std::min(FEW, u.rows - first), at = first * u.total + page * l.tokens;
            ahead.step(size_t(12 * rows));
            const Factors f = factors(u, page, first, rows, of_queries[first / FEW]);
            with_rows(rows, [&](auto count) {
                score_rows<V, count>(&u.levels[at], u.total, f.scale, u.scales(l, KEYS, page), f.noise, f.base, &u.scores[at], u.total, page == 0, &u.lanes[16 * first], ahead.take(V, u.record[page]));
            });
        }
    }
    find_peaks(u);
    for (int64_t row = 0; row < u.rows; ++row) u.shift[row] = std::rint(u.peak[row]);
}

// p of all tokens; the log-sum-exp of each row over the granule.
template <int V>
inline void soften(const Layout& l, Unit& u, float* log_sums, Ahead& ahead) {
    room(u.p, u.rows * u.total);
    for (int64_t first = 0; first < u.rows; first += FEW) {
        const Each shift = Each::of(load4(&u.shift[first]));
        with_rows(u.rows - first, [&](auto count) {
            float total[FEW] = {};
            for (int64_t page = 0; page < u.pages(); ++page) {
                const int64_t at = first * u.total + page * l.tokens;
                const Each sum = soften_rows<V, count>(&u.scores[at], u.total, shift, &u.p[at], ahead.take(V, u.record[page]));
                for (int r = 0; r < count; ++r) total[r] += sum.row[r];
            }
            for (int r = 0; r < count; ++r) log_sums[first + r] = u.shift[first + r] + std::log2(total[r]);
        });
    }
}

// Chooses the tokens and sends for their low bits.
inline void choose(const Layout& l, const Refinement& refine, Unit& u, const float* log_sums, Workspace& s, Ahead& ahead) {
    const int64_t share = int64_t(std::ceil(double(u.total) * refine.share)), count = std::min(u.total, std::max(refine.min_tokens, share));
    const int64_t lists = refine.group ? 1 : u.rows, masks = u.total / 16;
    int32_t* tokens = room(u.selected, lists * count + 16);
    select(u.rows, u.total, u.scores.data(), log_sums, refine.group != 0, count, room(s.keys, u.total), room(s.some, u.total + 16), tokens, room(u.taken, lists * masks));
    for (int64_t i = 0; i < lists; ++i) {
        const List list = {i, u.rows / lists, count, tokens + i * count};
        u.lists.push_back(list);
        for (Side side : {KEYS, VALUES}) {
            const int64_t bytes = (l.bits[side] - l.scan_bits[side]) * l.dim / 8;
            if (!bytes) continue;
            ahead.expect(count, bytes);
            for (int64_t j = 0; j < count; ++j) ahead.add(u.low_bits(l, side, list.tokens[j]), bytes);
        }
    }
}

// Scans and selects.
template <int V>
inline void begin(const Layout& l, const Queries& q, const Refinement& refine, const Operands& keys, Unit& u, Workspace& s, Ahead& ahead) {
    score_pages<V>(l, q, refine.scan_noise, keys, u, s, ahead);
    float* log_sums = room(s.log_sum_exp, u.rows);
    soften<V>(l, u, log_sums, ahead);
    choose(l, refine, u, log_sums, s, ahead);
}

}  // namespace
