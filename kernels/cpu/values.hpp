// The second half of a unit: scores of the refined tokens by their full codes, the softmax, and the sums of values.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ahead.hpp"
#include "token_codes.hpp"
#include "unit.hpp"
#include "weigh.hpp"

namespace {

// Channels d .. d + 16 COUNT - 1 of o = (ADD: o +) sums of all pages: their values' integer sums, and their centroids by their weights.
template <int COUNT, int ROWS, bool ADD>
inline void combine_channels(const Layout& l, const Unit& u, int64_t first, int64_t d, float* o) {
    const int64_t dim = l.dim, pages = u.pages();
    const Each *mass = &u.mass[u.block(first, 0)], *size = &u.size[u.block(first, 0)];
    const int32_t* sums = u.sums.data() + first * dim + d;
    Sixteen sum[COUNT][ROWS];
    UNROLLED for (int i = 0; i < COUNT; ++i)
        UNROLLED for (int r = 0; r < ROWS; ++r) sum[i][r] = ADD ? load16(o + r * dim + d + 16 * i) : Sixteen{};
    for (int64_t page = 0; page < pages; ++page, sums += u.rows * dim) {
        const uint8_t* center = u.centroid(l, VALUES, page) + 2 * d;
        UNROLLED for (int i = 0; i < COUNT; ++i) {
            const Sixteen middle = load_halves(center + 32 * i);
            UNROLLED for (int r = 0; r < ROWS; ++r) sum[i][r] = fused(middle, sixteen(mass[page].row[r]), sum[i][r]);
            UNROLLED for (int r = 0; r < ROWS; ++r)
                sum[i][r] = fused(__builtin_convertvector(load16(sums + r * dim + 16 * i), Sixteen), sixteen(size[page].row[r]), sum[i][r]);
        }
    }
    UNROLLED for (int i = 0; i < COUNT; ++i)
        UNROLLED for (int r = 0; r < ROWS; ++r) store16(o + r * dim + d + 16 * i, sum[i][r]);
}

template <int ROWS, bool ADD>
inline void combine_rows(const Layout& l, const Unit& u, int64_t first, float* o) {
    int64_t d = 0;
    for (; d + 64 <= l.dim; d += 64) combine_channels<4, ROWS, ADD>(l, u, first, d, o);
    for (; d + 16 <= l.dim; d += 16) combine_channels<1, ROWS, ADD>(l, u, first, d, o);
    for (; d < l.dim; ++d)
        for (int r = 0; r < ROWS; ++r) {
            float sum = ADD ? o[r * l.dim + d] : 0.0f;
            for (int64_t page = 0; page < u.pages(); ++page) {
                const int64_t at = u.block(first, page);
                uint16_t center;
                std::memcpy(&center, u.centroid(l, VALUES, page) + 2 * d, 2);
                sum += half_to_float(center) * u.mass[at].row[r] + float(u.sums[(page * u.rows + first + r) * l.dim + d]) * u.size[at].row[r];
            }
            o[r * l.dim + d] = sum;
        }
}

template <bool ADD>
inline void combine(const Layout& l, const Unit& u, float* o) {
    for (int64_t first = 0; first < u.rows; first += FEW)
        with_rows(u.rows - first, [&](auto rows) { combine_rows<rows, ADD>(l, u, first, o + first * l.dim); });
}

// The full scales of a list's tokens in halves, zeros up to whole registers. What is gathered one by one is not yet there for a register that
// loads all of it, so that gathering comes first and something else in between.
inline const uint8_t* full_scales(const Layout& l, Side side, const Unit& u, const List& list, Workspace& s) {
    const int64_t whole = list.whole();
    uint16_t* half = room(s.halves, whole);
    for (int64_t i = 0; i < list.count; ++i) std::memcpy(half + i, u.full_scale(l, side, list.tokens[i]), 2);
    std::fill(half + list.count, half + whole, uint16_t(0));
    return reinterpret_cast<const uint8_t*>(half);
}

// Scores by full codes of some rows of a list, -inf past its last token; the largest of each. kept: the scanned levels, dots: of the low bits.
template <int ROWS>
inline Each rescore_rows(const Layout& l, const Queries& q, float noise_factor, const List& list, int64_t row, const Unit& u, const uint8_t* a, const int32_t* kept, const int32_t* dots, float* refined) {
    const int64_t whole = list.whole(), low = l.bits[KEYS] - l.scan_bits[KEYS];
    Sixteen most[FEW], base[ROWS];
    float scale[ROWS], noise[ROWS];
    int32_t less[ROWS];
    UNROLLED for (int r = 0; r < FEW; ++r) most[r] = Sixteen{} - INFINITY;
    code_sums(q.codes + (u.first + row) * l.dim, ROWS, l.dim, less);
    UNROLLED for (int r = 0; r < ROWS; ++r) {
        const int64_t of_query = u.first + row + r;
        scale[r] = q.scale[of_query] * 0.5f, noise[r] = q.norm2[of_query] * noise_factor, less[r] *= (1 << low) - 1;
        base[r] = load16(&u.base[(row + r) * u.pages()]);
    }
    for (int64_t i = 0; i < whole; i += 16) {
        const SixteenInts page = load16(list.tokens + i) >> u.page_log2;
        const Sixteen size = load_halves(a + 2 * i), square = size * size;
        UNROLLED for (int r = 0; r < ROWS; ++r) {
            // 2 code - (2^B - 1) = 2^low (2 top - (2^S - 1)) + 2 bits - (2^low - 1)
            const SixteenInts level = (load16(kept + r * whole + i) << int(low)) + 2 * load16(dots + r * whole + i) - less[r];
            const Sixteen all = (__builtin_convertvector(level, Sixteen) * scale[r] * size + noise[r] * square) + pick(base[r], page);
            const Sixteen score = first_of(all, list.count - i, -INFINITY);
            store16(refined + r * whole + i, score), most[r] = larger(score, most[r]);
        }
    }
    return Each::of(most16(most));
}

// Scores of a list's tokens by their full codes, or as scanned if there is nothing below: [rows][whole]. The largest of each row goes to `peak`.
inline void rescore(const Layout& l, const Queries& q, float noise_factor, const List& list, const Unit& u, float* refined, float* peak, Workspace& s) {
    const int64_t D = l.dim, count = list.count, whole = list.whole(), low = l.bits[KEYS] - l.scan_bits[KEYS];
    if (!low) {
        for (int64_t r = 0; r < list.rows; ++r) {
            for (int64_t i = 0; i < whole; ++i) refined[r * whole + i] = i < count ? u.scores[(list.row + r) * u.total + list.tokens[i]] : -INFINITY;
            peak[r] = max16(refined + r * whole, whole);
        }
        return;
    }
    const uint8_t* a = full_scales(l, KEYS, u, list, s);
    int32_t *dots = room(s.dots, 2 * list.rows * whole), *kept = dots + list.rows * whole;
    for (int64_t r = 0; r < list.rows; ++r) {
        const int32_t* levels = &u.levels[(list.row + r) * u.total];
        for (int64_t i = 0; i < count; ++i) kept[r * whole + i] = levels[list.tokens[i]];
        std::fill(kept + r * whole + count, kept + (r + 1) * whole, 0);
    }
    token_dots(count, [&](int64_t i) { return u.low_bits(l, KEYS, list.tokens[i]); }, low, D, q.codes + (u.first + list.row) * D, list.rows, dots, whole, room(s.codes, code_stride(D)));
    for (int64_t first = 0; first < list.rows; first += FEW)
        with_rows(list.rows - first, [&](auto rows) {
            const Each most = rescore_rows<rows>(l, q, noise_factor, list, list.row + first, u, a, kept + first * whole, dots + first * whole, refined + first * whole);
            for (int r = 0; r < rows; ++r) peak[first + r] = most.row[r];
        });
}

// Level sums of the scanned values of all pages; integers: weights [pages][rows][P].
inline void dot_values(const Layout& l, Unit& u, const int8_t* integers, Workspace& s, Ahead& ahead) {
    for (int64_t page = 0; page < u.pages(); ++page) {
        s.weights.set<false>(l.scan_bits[VALUES], l.tokens / 4, integers + page * u.rows * l.tokens, l.tokens, u.rows);
        s.weights.dot(u.record[page] + l.planes[VALUES], l.dim / 8, &u.sums[page * u.rows * l.dim], l.dim, ahead);
    }
}

// Weights of all pages and the sums of scanned values by them: the tokens that are in no list, or all unless refined
// tokens are `apart`. Masses and sizes count from each row's shift. p are weights afterwards.
template <int V>
inline void sum_scanned(const Layout& l, Unit& u, bool apart, Workspace& s, Ahead& ahead) {
    static constexpr uint16_t NONE[32] = {};  // of a granule
    const int64_t P = l.tokens, pages = u.pages(), masks = u.total / 16;
    int8_t* integers = room(s.integers, pages * u.rows * P);
    const float unit = level_unit(l.scan_bits[VALUES]);
    Each* most = room(s.most, pages);
    for (int64_t first = 0; first < u.rows; first += FEW) {
        const int64_t some = std::min(FEW, u.rows - first);
        with_rows(some, [&](auto count) {
            for (int64_t page = 0; page < pages; ++page) {
                ahead.step(size_t(12 * some));
                const uint16_t* taken[FEW] = {NONE, NONE, NONE, NONE};
                if (apart)
                    for (int r = 0; r < count; ++r) taken[r] = u.taken.data() + (u.lists.size() > 1 ? (first + r) * masks : 0) + page * P / 16;
                float* p = &u.p[first * u.total + page * P];
                const Weighed found = weigh_rows<V, count>(p, u.total, taken, u.scales(l, VALUES, page), ahead.take(V, u.record[page]));
                most[page] = found.most;
                u.mass[u.block(first, page)] = found.sum;
            }
            for (int64_t page = 0; page < pages; ++page) {
                const Each size = quantize_rows<V>(count, &u.p[first * u.total + page * P], u.total, most[page], integers + (page * u.rows + first) * P);
                u.size[u.block(first, page)] = Each::of(size.all() * unit);
            }
        });
    }
    dot_values(l, u, integers, s, ahead);
}

// The tokens of a list that are of one page: first .. last - 1.
struct Part {
    int64_t page, first, last;
};

// Weights p a [rows][whole] of some rows of a list; their largest of each page [FEW][16], and the sums of p to the pages' masses.
template <int ROWS>
inline void weigh_list(Unit& u, const List& list, int64_t from, const Part* part, int64_t parts, const float* p, const uint8_t* a, float* weights, float* most) {
    const int64_t whole = list.whole();
    UNROLLED for (int r = 0; r < ROWS; ++r)
        for (int64_t i = 0; i < whole; i += 16) store16(weights + r * whole + i, load16(p + r * whole + i) * load_halves(a + 2 * i));
    for (const Part* end = part + parts; part < end; ++part) {
        Sixteen sum[FEW] = {}, peak[FEW] = {};
        for (int64_t i = part->first / 16 * 16; i < part->last; i += 16) {
            const uint32_t after = uint32_t(-1) << std::max<int64_t>(part->first - i, 0), before = uint32_t((uint64_t(1) << std::min<int64_t>(part->last - i, 16)) - 1);
            const uint16_t others = uint16_t(~(after & before));
            UNROLLED for (int r = 0; r < ROWS; ++r) {
                sum[r] += without(load16(p + r * whole + i), others);
                peak[r] = larger_size(without(load16(weights + r * whole + i), others), peak[r]);
            }
        }
        const Each mass = Each::of(fold16(sum)), top = Each::of(most16(peak));
        float* to = &u.mass[u.block(list.row + from, part->page)].row[(list.row + from) % FEW];
        UNROLLED for (int r = 0; r < ROWS; ++r) to[r] += mass.row[r], most[16 * r + part->page] = top.row[r];
    }
}

// Adds refined tokens: their p [rows][whole] to the pages' masses, and to o the sums of values by full codes, whose integer weights have one
// scale for each page and row.
inline void add_list(const Layout& l, Unit& u, const List& list, const float* p, Workspace& s, float* o) {
    const int64_t D = l.dim, whole = list.whole(), stride = code_stride(D);
    auto words_at = [&](int64_t i) { return u.record[u.page_of(list.tokens[i])] + l.planes[VALUES]; };
    const uint8_t* a = full_scales(l, VALUES, u, list, s);
    uint8_t* codes = room(s.codes, list.count * stride);
    value_codes(list.count, [&](int64_t i) { return u.low_bits(l, VALUES, list.tokens[i]); }, l.bits[VALUES] - l.scan_bits[VALUES],
                words_at, [&](int64_t i) { return u.within_page(list.tokens[i]); }, l.scan_bits[VALUES], l.tokens * D / 8, D, codes);
    Part part[16];
    int64_t parts = 0;
    for (int64_t i = 0, last; i < list.count; i = last, ++parts) {
        for (last = i + 1; last < list.count && u.page_of(list.tokens[last]) == u.page_of(list.tokens[i]); ++last) {}
        part[parts] = {u.page_of(list.tokens[i]), i, last};
    }
    float* weights = room(s.weight, FEW * whole);
    int8_t* integers = room(s.integers, FEW * whole + 16);
    for (int64_t from = 0; from < list.rows; from += FEW) {
        const int64_t rows = std::min(FEW, list.rows - from);
        alignas(64) float most[FEW * 16] = {}, size[FEW * 16];
        with_rows(rows, [&](auto some) { weigh_list<some>(u, list, from, part, parts, p + from * whole, a, weights, most); });
        for (int64_t r = 0; r < rows; ++r) {
            const Sixteen top = load16(most + 16 * r), factor = to_integers(top);
            store16(size + 16 * r, top / 127.0f * 0.5f);
            for (int64_t i = 0; i < whole; i += 16)
                store_bytes(integers + r * whole + i, (SixteenInts)(load16(weights + r * whole + i) * pick(factor, load16(list.tokens + i) >> u.page_log2) + ROUNDER));
        }
        for (const Part* at = part; at < part + parts; ++at) {
            Each by;
            for (int64_t r = 0; r < FEW; ++r) by.row[r] = size[16 * r + at->page];
            add_token_sums(codes + at->first * stride, at->last - at->first, D, integers + at->first, whole, rows, by.row, l.bits[VALUES], o + (list.row + from) * D);
        }
    }
}

// Moves p to the peak, by `factor`, and gives the refined tokens theirs: their scanned values count.
inline void replace(Unit& u, float factor, int64_t row, const List& list, const float* p) {
    for (int64_t t = row * u.total; t < (row + 1) * u.total; t += 16) store16(&u.p[t], load16(&u.p[t]) * factor);
    for (int64_t i = 0; i < list.count; ++i) u.p[row * u.total + list.tokens[i]] = p[i];
}

// The largest score of a row among those that are not taken.
inline float largest_left(const float* scores, int64_t total, const uint16_t* taken) {
    const Sixteen none = Sixteen{} - INFINITY;
    Sixteen most = none;
    for (int64_t t = 0; t < total; t += 16) most = larger(load16(scores + t) + without(none, uint16_t(~taken[t / 16])), most);
    return most16(most);
}

// Scores by full codes and what follows from them: partials m of the rows, p [rows][whole] of the refined tokens, and by what each row's scanned
// p, which count from its shift, are multiplied to count from m. Returns whether one of these factors is out of range.
inline bool refine_scores(const Layout& l, const Queries& q, float noise_factor, const Unit& u, float* refined, float* factor, float* m, Workspace& s) {
    bool far = false;
    for (const List& list : u.lists) {
        const int64_t whole = list.whole();
        rescore(l, q, noise_factor, list, u, refined + list.row * whole, m + list.row, s);
        for (int64_t row = list.row; row < list.row + list.rows; ++row) {
            float* to = refined + row * whole;
            float peak = m[row];
            // Where a taken token has the largest scanned score of all, it may be that no other one exceeds the refined scores. What is not finite
            // must not pass for an empty partial.
            if (!(u.peak[row] <= peak)) {
                const float left = largest_left(&u.scores[row * u.total], u.total, &u.taken[(u.lists.size() > 1 ? row : 0) * u.total / 16]);
                peak = u.peak[row] != u.peak[row] ? NAN : peak > left ? peak : left;
            }
            for (int64_t i = 0; i < whole; i += 16) store16(to + i, exp2_fast(load16(to + i) - peak));
            m[row] = peak, factor[row] = exp2_fast(u.shift[row] - peak), far |= !(std::fabs(u.shift[row] - peak) < 32.0f);
        }
    }
    return far;
}

// What refinement changes, and the values' sums. Partials m, l [rows], o [rows][D] of a unit whose tokens are chosen. Until their low bits are
// here, scanned values are summed.
template <int V>
inline void finish(const Layout& l, const Queries& q, const Refinement& refine, Unit& u, Workspace& s, Ahead& ahead, float* m, float* l_out, float* o) {
    const bool apart = l.scan_bits[VALUES] < l.bits[VALUES];  // refined tokens have values of their own
    const int64_t pages = u.pages(), whole = u.lists[0].whole();
    if (apart) sum_scanned<V>(l, u, true, s, ahead);
    float *refined = room(s.refined, u.rows * whole + 16), *factor = room(s.factor, u.rows);
    const bool far = refine_scores(l, q, refine.full_noise, u, refined, factor, m, s);
    if (far) {  // p may have lost what now counts
        soften<V>(l, u, room(s.log_sum_exp, u.rows), ahead);
        for (int64_t row = 0; row < u.rows; ++row) {
            if (std::fabs(u.shift[row] - m[row]) < 32.0f) continue;
            for (int64_t t = row * u.total; t < (row + 1) * u.total; t += 16) store16(&u.p[t], exp2_fast(load16(&u.scores[t]) - m[row]));
            factor[row] = 1.0f;
        }
    }
    if (!apart)
        for (const List& list : u.lists)
            for (int64_t row = list.row; row < list.row + list.rows; ++row) replace(u, factor[row], row, list, refined + row * whole), factor[row] = 1.0f;
    if (far || !apart) sum_scanned<V>(l, u, apart, s, ahead);
    for (int64_t first = 0; first < u.rows; first += FEW) {
        Each total = {}, by = {};
        for (int64_t r = 0; r < FEW && first + r < u.rows; ++r) {
            by.row[r] = factor[first + r];
            Sixteen mass = {};
            for (int64_t i = 0; i < whole && apart; i += 16) mass += load16(refined + (first + r) * whole + i);
            total.row[r] = fold16(mass);
        }
        for (int64_t at = u.block(first, 0); at < u.block(first, pages); ++at) {
            u.mass[at] = Each::of(u.mass[at].all() * by.all()), u.size[at] = Each::of(u.size[at].all() * by.all());
            total = Each::of(total.all() + u.mass[at].all());
        }
        for (int64_t r = 0; r < FEW && first + r < u.rows; ++r) l_out[first + r] = total.row[r];
    }
    if (!apart) return combine<false>(l, u, o);
    std::fill_n(o, u.rows * l.dim, 0.0f);
    for (const List& list : u.lists) add_list(l, u, list, refined + list.row * whole, s, o);
    combine<true>(l, u, o);
}

// Tokens in any of the lists.
inline int64_t count_refined(const Unit& u) {
    if (u.lists.size() <= 1) return u.lists.empty() ? 0 : u.lists[0].count;
    std::vector<uint8_t> mark(u.total);
    int64_t refined = 0;
    for (const List& list : u.lists)
        for (int64_t i = 0; i < list.count; ++i) refined += !mark[list.tokens[i]], mark[list.tokens[i]] = 1;
    return refined;
}

}  // namespace
