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

// One row of o: the sums of all PAGES pages (if 0, of `pages`), which stand sum_stride apart.
template <int PAGES>
inline void combine_row(int64_t dim, int64_t pages, const float* centroid, const int32_t* sums, int64_t sum_stride, const float* mass, const float* size, float* __restrict o) {
    const int64_t count = PAGES ? PAGES : pages;
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) {
        Sixteen sum = {};
        UNROLLED for (int64_t page = 0; page < count; ++page)
            sum += load16(centroid + page * dim + d) * mass[page] + __builtin_convertvector(load16(sums + page * sum_stride + d), Sixteen) * size[page];
        store16(o + d, sum);
    }
    for (; d < dim; ++d) {
        float sum = 0.0f;
        for (int64_t page = 0; page < count; ++page) sum += centroid[page * dim + d] * mass[page] + float(sums[page * sum_stride + d]) * size[page];
        o[d] = sum;
    }
}

inline void combine(const Layout& l, const Unit& u, float* o) {
    const auto run = u.pages() == 4 ? combine_row<4> : combine_row<0>;
    for (int64_t r = 0; r < u.rows; ++r)
        run(l.dim, u.pages(), u.centroid[VALUES].data(), u.sums.data() + r * l.dim, u.rows * l.dim, &u.mass[r * u.pages()], &u.size[r * u.pages()], o + r * l.dim);
}

// The full scales of a list's tokens, zeros up to whole registers.
inline const float* full_scales(const Layout& l, Side side, const Unit& u, const List& list, Workspace& s) {
    float* scale = room(s.full, list.whole() + 16);
    std::fill(scale + list.count, scale + list.whole() + 16, 0.0f);
    for (int64_t i = 0; i < list.count; ++i) {
        uint16_t half;
        std::memcpy(&half, u.full_scale(l, side, list.tokens[i]), 2);
        scale[i] = half_to_float(half);
    }
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
    for (int64_t i = 0; i < count; ++i) read_low(u.low_bits(l, KEYS, list.tokens[i]), low, D, bytes + i * stride);
    int32_t* dots = room(s.dots, list.rows * whole);
    const int8_t* operands = q.codes + (u.first + list.row) * D;
    token_dots(bytes, count, D, operands, list.rows, dots, whole);
    const float* a = full_scales(l, KEYS, u, list, s);
    for (int64_t r = 0; r < list.rows; ++r) {
        const int64_t row = list.row + r;
        const float scale = q.scale[u.first + row] * 0.5f, noise = q.norm2[u.first + row] * noise_factor;
        int32_t code_sum = 0;
        for (int64_t d = 0; d < D; ++d) code_sum += operands[r * D + d];
        for (int64_t i = 0; i < whole; i += 16) {
            // 2 code - (2^B - 1) = 2^low (2 top - (2^S - 1)) + 2 bits - (2^low - 1)
            const SixteenInts level = (load16(&u.kept[row * whole + i]) << int(low)) + 2 * load16(dots + r * whole + i) - ((1 << low) - 1) * code_sum;
            const Sixteen size = load16(a + i), base = pick(&u.base[row * u.pages()], load16(list.tokens + i) >> u.page_log2);
            const Sixteen score = (__builtin_convertvector(level, Sixteen) * scale * size + noise * (size * size)) + base;
            store16(refined + r * whole + i, first_of(score, count - i, -INFINITY));
        }
    }
}

// Integer weights of a page: the tokens left in p count by their scanned values.
template <int V>
inline void weigh_page(const Layout& l, Unit& u, int64_t page, const float* peak, Workspace& s, Ahead& ahead) {
    const int64_t P = l.tokens, pages = u.pages();
    const float* a = &u.scale[VALUES][page * P];
    float* weights = room(s.rows, FEW * P);
    for (int64_t first = 0; first < u.rows; first += FEW) {
        const int64_t rows = std::min(FEW, u.rows - first), at = first * u.total + page * P;
        ahead.step(size_t(12 * rows));
        Each factor;
        for (int64_t r = 0; r < rows; ++r) {
            float &shift = u.shift[(first + r) * pages + page], most = peak[first + r], *p = &u.p[at + r * u.total];
            if (!(std::fabs(shift - most) < 32.0f)) {  // p may have lost what now counts
                for (int64_t t = 0; t < P; t += 16) store16(p + t, exp2_by_table(load16(&u.scores[at + r * u.total + t]) - most));
                shift = most;
            }
            factor.row[r] = exp2_fast(shift - most);
        }
        const Weighed found = weigh_rows<V, false, true>(rows, &u.p[at], u.total, {}, a, weights, P);
        const Each size = quantize_rows<V>(rows, weights, P, found.most, s.integers.data() + first * P);
        for (int64_t r = 0; r < rows; ++r) {
            u.mass[(first + r) * pages + page] = found.sum.row[r] * factor.row[r];
            u.size[(first + r) * pages + page] = size.row[r] * factor.row[r] * level_unit(l.scan_bits[VALUES]);
        }
    }
}

// o += sum of weights times values of a list's tokens of one page, first .. last - 1, by their full codes. p [rows][whole]; of p and a
// a register past the end can be read.
inline void add_refined(const Layout& l, const Unit& u, const List& list, int64_t first, int64_t last, const float* p, const float* a, Workspace& s, float* o) {
    const int64_t D = l.dim, count = last - first, padded = (count + 15) / 16 * 16, bits = l.bits[VALUES], scan = l.scan_bits[VALUES], stride = code_stride(D);
    const uint8_t* words = u.record[u.page_of(list.tokens[first])] + l.planes[VALUES];
    uint8_t* codes = room(s.codes, count * stride);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token = list.tokens[first + i];
        read_low(u.low_bits(l, VALUES, token), bits - scan, D, codes + i * stride);
        for (int64_t plane = 0; plane < scan; ++plane) add_bits(words + plane * l.tokens * D / 8, D, u.within_page(token), 1 << (bits - 1 - plane), codes + i * stride);
    }
    int8_t* integers = room(s.integers, list.rows * padded);
    float *weights = room(s.weight, FEW * padded), *size = room(s.refined_size, list.rows);
    int32_t *sums = room(s.dots, list.rows * D), *shift = room(s.code_sums, list.rows);
    for (int64_t from = 0; from < list.rows; from += FEW) {
        const int64_t some = std::min(FEW, list.rows - from);
        Sixteen most[FEW] = {};
        for (int64_t r = 0; r < some; ++r)
            for (int64_t i = 0; i < padded; i += 16) {
                const Sixteen w = first_of(load16(p + (from + r) * list.whole() + first + i) * load16(a + first + i), count - i, 0.0f);
                store16(weights + r * padded + i, w), most[r] = larger(w, most[r]);
            }
        const Each peak = Each::of(most16(most));
        for (int64_t r = 0; r < some; ++r) {
            const float factor = peak.row[r] < 7.9e-31f ? 0.0f : 127.0f / peak.row[r];
            SixteenInts sum = {};
            for (int64_t i = 0; i < padded; i += 16) {
                const SixteenInts n = (SixteenInts)(load16(weights + r * padded + i) * factor + ROUNDER);
                store_bytes(integers + (from + r) * padded + i, n), sum += n - bits_of(ROUNDER);
            }
            size[from + r] = peak.row[r] / 127.0f * 0.5f;
            shift[from + r] = ((1 << bits) - 1) * sum16(sum);
        }
    }
    token_sums(codes, count, D, integers, padded, list.rows, sums);
    for (int64_t r = 0; r < list.rows; ++r) {
        const int32_t* sum = sums + r * D;
        float* __restrict to = o + (list.row + r) * D;
        const int32_t less = shift[r];
        const float by = size[r];
        for (int64_t d = 0; d < D; ++d) to[d] += float(2 * sum[d] - less) * by;
    }
}

// Moves p to the shift `peak` and gives the refined tokens theirs: their scanned values count.
inline void replace(Unit& u, int64_t page_tokens, float peak, int64_t row, const List& list, const float* p) {
    for (int64_t page = 0; page < u.pages(); ++page) {
        float &shift = u.shift[row * u.pages() + page], *of_page = &u.p[row * u.total + page * page_tokens];
        const bool lost = !(std::fabs(shift - peak) < 32.0f);
        const float factor = exp2_fast(shift - peak), *scores = &u.scores[row * u.total + page * page_tokens];
        for (int64_t t = 0; t < page_tokens; t += 16) store16(of_page + t, lost ? exp2_by_table(load16(scores + t) - peak) : load16(of_page + t) * factor);
        shift = peak;
    }
    for (int64_t i = 0; i < list.count; ++i) u.p[row * u.total + list.tokens[i]] = p[i];
}

// Partials m, l [rows], o [rows][D] of a unit that was begun.
template <int V>
inline void finish(const Layout& l, const Queries& q, const Refinement& refine, Unit& u, Workspace& s, Ahead& ahead, float* m, float* l_out, float* o) {
    const bool apart = l.scan_bits[VALUES] < l.bits[VALUES];  // refined tokens have values of their own
    const int64_t pages = u.pages(), P = l.tokens;
    const int64_t whole = u.lists.empty() ? 0 : u.lists[0].whole();
    float* refined = room(s.refined, u.rows * whole + 16);
    for (const List& list : u.lists) {
        rescore(l, q, refine.full_noise, list, u, refined + list.row * whole, s);
        for (int64_t row = list.row; row < list.row + list.rows; ++row) {
            float *scores = &u.scores[row * u.total], *p = &u.p[row * u.total], *to = refined + row * whole;
            for (int64_t i = 0; i < list.count; ++i) scores[list.tokens[i]] = -INFINITY, p[list.tokens[i]] = 0.0f;
            const float most = max16(to, whole), left = max16(scores, u.total), peak = m[row] = most > left ? most : left;
            Sixteen mass = {};
            for (int64_t i = 0; i < whole; i += 16) {
                const Sixteen of_refined = exp2_by_table(load16(to + i) - peak);
                store16(to + i, of_refined), mass += of_refined;
            }
            l_out[row] = apart ? fold16(mass) : 0.0f;
            if (!apart) replace(u, P, peak, row, list, to);
        }
    }
    room(s.integers, u.rows * P);
    for (int64_t page = 0; page < pages; ++page) {
        u.load(l, VALUES, page);
        weigh_page<V>(l, u, page, m, s, ahead);
        for (int64_t r = 0; r < u.rows; ++r) l_out[r] += u.mass[r * pages + page];
        s.weights.set(l.scan_bits[VALUES], P / 4, s.integers.data(), P, u.rows);
        s.weights.dot(u.record[page] + l.planes[VALUES], l.dim / 8, &u.sums[page * u.rows * l.dim], l.dim, ahead);
    }
    if (apart)
        for (const List& list : u.lists)
            for (int64_t i = 0; i < list.count; ++i)
                for (int64_t r = list.row; r < list.row + list.rows; ++r)
                    u.mass[r * pages + u.page_of(list.tokens[i])] += refined[r * whole + i];
    combine(l, u, o);
    if (!apart) return;
    for (const List& list : u.lists) {
        const float* a = full_scales(l, VALUES, u, list, s);
        for (int64_t first = 0, last; first < list.count; first = last) {
            last = first + 1;
            while (last < list.count && u.page_of(list.tokens[last]) == u.page_of(list.tokens[first])) ++last;
            add_refined(l, u, list, first, last, refined + list.row * whole, a, s, o);
        }
    }
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
