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

// o = (ADD: o +) sums of all pages, PAGES of them (if 0, of u.pages()): their values' integer sums, and their centroids by their weights.
template <int PAGES, int ROWS, bool ADD>
inline void combine_rows(const Layout& l, const Unit& u, int64_t first, float* o) {
    const int64_t dim = l.dim, pages = PAGES ? PAGES : u.pages(), stride = u.rows * dim;
    const float *mass = &u.mass[first * pages], *size = &u.size[first * pages];
    const int32_t* sums = u.sums.data() + first * dim;
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) {
        Sixteen sum[ROWS];
        UNROLLED for (int r = 0; r < ROWS; ++r) sum[r] = ADD ? load16(o + r * dim + d) : Sixteen{};
        UNROLLED for (int64_t page = 0; page < pages; ++page) {
            const Sixteen center = load_halves(u.centroid(l, VALUES, page) + 2 * d);
            UNROLLED for (int r = 0; r < ROWS; ++r) sum[r] = fused(center, Sixteen{} + mass[r * pages + page], sum[r]);
            UNROLLED for (int r = 0; r < ROWS; ++r)
                sum[r] = fused(__builtin_convertvector(load16(sums + page * stride + r * dim + d), Sixteen), Sixteen{} + size[r * pages + page], sum[r]);
        }
        UNROLLED for (int r = 0; r < ROWS; ++r) store16(o + r * dim + d, sum[r]);
    }
    for (; d < dim; ++d)
        for (int r = 0; r < ROWS; ++r) {
            float sum = ADD ? o[r * dim + d] : 0.0f;
            for (int64_t page = 0; page < pages; ++page) {
                uint16_t center;
                std::memcpy(&center, u.centroid(l, VALUES, page) + 2 * d, 2);
                sum += half_to_float(center) * mass[r * pages + page] + float(sums[page * stride + r * dim + d]) * size[r * pages + page];
            }
            o[r * dim + d] = sum;
        }
}

template <bool ADD>
inline void combine(const Layout& l, const Unit& u, float* o) {
    for (int64_t first = 0; first < u.rows; first += FEW)
        with_rows(u.rows - first, [&](auto rows) {
            if (u.pages() == 4) combine_rows<4, rows, ADD>(l, u, first, o + first * l.dim);
            else combine_rows<0, rows, ADD>(l, u, first, o + first * l.dim);
        });
}

// The full scales of a list's tokens, zeros up to whole registers.
inline const float* full_scales(const Layout& l, Side side, const Unit& u, const List& list, Workspace& s) {
    const int64_t whole = list.whole() + 16;
    float* scale = room(s.full, whole);
    uint16_t* half = room(s.halves, whole);
    for (int64_t i = 0; i < list.count; ++i) std::memcpy(half + i, u.full_scale(l, side, list.tokens[i]), 2);
    std::fill(half + list.count, half + whole, uint16_t(0));
    for (int64_t i = 0; i < whole; i += 16) store16(scale + i, load_halves(reinterpret_cast<const uint8_t*>(half + i)));
    return scale;
}

// Scores of a list's tokens by their full codes, or as scanned if there is nothing below: [rows][whole], -inf past the last.
inline void rescore(const Layout& l, const Queries& q, float noise_factor, const List& list, const Unit& u, float* refined, Workspace& s) {
    const int64_t D = l.dim, count = list.count, whole = list.whole(), low = l.bits[KEYS] - l.scan_bits[KEYS], stride = code_stride(D);
    if (!low) {
        for (int64_t r = 0; r < list.rows; ++r)
            for (int64_t i = 0; i < whole; ++i) refined[r * whole + i] = i < count ? u.scores[(list.row + r) * u.total + list.tokens[i]] : -INFINITY;
        return;
    }
    uint8_t* bytes = room(s.codes, count * stride);
    read_low(count, [&](int64_t i) { return u.low_bits(l, KEYS, list.tokens[i]); }, low, D, bytes);
    int32_t *dots = room(s.dots, (list.rows + 1) * whole), *kept = dots + list.rows * whole;
    std::fill(kept + count, kept + whole, 0);
    const int8_t* operands = q.codes + (u.first + list.row) * D;
    token_dots(bytes, count, D, operands, list.rows, dots, whole);
    const float* a = full_scales(l, KEYS, u, list, s);
    for (int64_t r = 0; r < list.rows; ++r) {
        const int64_t row = list.row + r;
        const float scale = q.scale[u.first + row] * 0.5f, noise = q.norm2[u.first + row] * noise_factor;
        int32_t code_sum = 0;
        for (int64_t d = 0; d < D; ++d) code_sum += operands[r * D + d];
        for (int64_t i = 0; i < count; ++i) kept[i] = u.levels[row * u.total + list.tokens[i]];
        for (int64_t i = 0; i < whole; i += 16) {
            // 2 code - (2^B - 1) = 2^low (2 top - (2^S - 1)) + 2 bits - (2^low - 1)
            const SixteenInts level = (load16(kept + i) << int(low)) + 2 * load16(dots + r * whole + i) - ((1 << low) - 1) * code_sum;
            const Sixteen size = load16(a + i), base = pick(&u.base[row * u.pages()], load16(list.tokens + i) >> u.page_log2);
            const Sixteen score = (__builtin_convertvector(level, Sixteen) * scale * size + noise * (size * size)) + base;
            store16(refined + r * whole + i, first_of(score, count - i, -INFINITY));
        }
    }
}

// Level sums of the scanned values of all pages; integers: weights [pages][rows][P].
inline void dot_values(const Layout& l, Unit& u, const int8_t* integers, Workspace& s, Ahead& ahead) {
    for (int64_t page = 0; page < u.pages(); ++page) {
        s.weights.set(l.scan_bits[VALUES], l.tokens / 4, integers + page * u.rows * l.tokens, l.tokens, u.rows);
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
                const Weighed found = weigh_rows<V, count>(p, u.total, taken, u.scales(l, VALUES, page));
                most[page] = found.most;
                for (int r = 0; r < count; ++r) u.mass[(first + r) * pages + page] = found.sum.row[r];
            }
            for (int64_t page = 0; page < pages; ++page) {
                const Each size = quantize_rows<V>(count, &u.p[first * u.total + page * P], u.total, most[page], integers + (page * u.rows + first) * P);
                for (int r = 0; r < count; ++r) u.size[(first + r) * pages + page] = size.row[r] * unit;
            }
        });
    }
    dot_values(l, u, integers, s, ahead);
}

// Adds the tokens of a list that are of one page, first .. last - 1: their p [rows][whole] to the page's mass, and the sum of weights times
// values by their full codes to o. Of p and a, a register past the end can be read.
inline void add_refined(const Layout& l, Unit& u, const List& list, int64_t first, int64_t last, const float* p, const float* a, const uint8_t* codes, Workspace& s, float* o) {
    const int64_t count = last - first, padded = (count + 15) / 16 * 16, page = u.page_of(list.tokens[first]);
    int8_t* integers = room(s.integers, FEW * padded);
    float* weights = room(s.weight, FEW * padded);
    for (int64_t from = 0; from < list.rows; from += FEW) {
        const int64_t rows = std::min(FEW, list.rows - from);
        Sixteen most[FEW] = {}, mass[FEW] = {}, total[FEW] = {};
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < padded; i += 16) {
                const Sixteen x = first_of(load16(p + (from + r) * list.whole() + first + i), count - i, 0.0f), w = x * first_of(load16(a + first + i), count - i, 0.0f);
                store16(weights + r * padded + i, w), mass[r] += x, most[r] = larger(w, most[r]);
            }
        const Each peak = Each::of(most16(most)), sum = Each::of(fold16(mass));
        Each size;
        for (int64_t r = 0; r < rows; ++r) {
            size.row[r] = peak.row[r] / 127.0f * 0.5f, u.mass[(list.row + from + r) * u.pages() + page] += sum.row[r];
            const float factor = to_integers(peak.row[r]);
            for (int64_t i = 0; i < padded; i += 16) {
                const Sixteen n = load16(weights + r * padded + i) * factor + ROUNDER;
                store_bytes(integers + r * padded + i, (SixteenInts)n), total[r] += n - ROUNDER;
            }
        }
        add_token_sums(codes + first * code_stride(l.dim), count, l.dim, integers, padded, rows, size.row, Each::of(fold16(total)).row, l.bits[VALUES], o + (list.row + from) * l.dim);
    }
}

// The refined tokens of all lists, page by page; p [rows][whole] of all rows.
inline void add_lists(const Layout& l, Unit& u, const float* p, Workspace& s, float* o) {
    const int64_t D = l.dim, bits = l.bits[VALUES], scan = l.scan_bits[VALUES], stride = code_stride(D);
    for (const List& list : u.lists) {
        const float* a = full_scales(l, VALUES, u, list, s);
        uint8_t* codes = room(s.codes, list.count * stride);
        read_low(list.count, [&](int64_t i) { return u.low_bits(l, VALUES, list.tokens[i]); }, bits - scan, D, codes);
        for (int64_t i = 0; i < list.count; ++i) {
            const uint8_t* words = u.record[u.page_of(list.tokens[i])] + l.planes[VALUES];
            for (int64_t plane = 0; plane < scan; ++plane) add_bits(words + plane * l.tokens * D / 8, D, u.within_page(list.tokens[i]), 1 << (bits - 1 - plane), codes + i * stride);
        }
        for (int64_t first = 0, last; first < list.count; first = last) {
            last = first + 1;
            while (last < list.count && u.page_of(list.tokens[last]) == u.page_of(list.tokens[first])) ++last;
            add_refined(l, u, list, first, last, p + list.row * list.whole(), a, codes, s, o);
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
        rescore(l, q, noise_factor, list, u, refined + list.row * whole, s);
        for (int64_t row = list.row; row < list.row + list.rows; ++row) {
            float* to = refined + row * whole;
            float peak = max16(to, whole);
            // Where a taken token has the largest scanned score of all, it may be that no other one exceeds the refined scores.
            if (!(u.peak[row] <= peak)) {
                const float left = largest_left(&u.scores[row * u.total], u.total, &u.taken[(u.lists.size() > 1 ? row : 0) * u.total / 16]);
                peak = peak > left ? peak : left;
            }
            for (int64_t i = 0; i < whole; i += 16) store16(to + i, exp2_fast(load16(to + i) - peak));
            m[row] = peak, factor[row] = exp2_fast(u.shift(row) - peak), far |= !(std::fabs(u.shift(row) - peak) < 32.0f);
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
        soften<V>(l, u, room(s.log_sum_exp, u.rows));
        for (int64_t row = 0; row < u.rows; ++row) {
            if (std::fabs(u.shift(row) - m[row]) < 32.0f) continue;
            for (int64_t t = row * u.total; t < (row + 1) * u.total; t += 16) store16(&u.p[t], exp2_fast(load16(&u.scores[t]) - m[row]));
            factor[row] = 1.0f;
        }
    }
    if (!apart)
        for (const List& list : u.lists)
            for (int64_t row = list.row; row < list.row + list.rows; ++row) replace(u, factor[row], row, list, refined + row * whole), factor[row] = 1.0f;
    if (far || !apart) sum_scanned<V>(l, u, apart, s, ahead);
    for (int64_t row = 0; row < u.rows; ++row) {
        float total = 0.0f;
        if (apart) {
            Sixteen mass = {};
            for (int64_t i = 0; i < whole; i += 16) mass += load16(refined + row * whole + i);
            total = fold16(mass);
        }
        for (int64_t at = row * pages; at < (row + 1) * pages; ++at) u.mass[at] *= factor[row], u.size[at] *= factor[row], total += u.mass[at];
        l_out[row] = total;
    }
    if (!apart) return combine<false>(l, u, o);
    std::fill_n(o, u.rows * l.dim, 0.0f);
    add_lists(l, u, refined, s, o);
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
