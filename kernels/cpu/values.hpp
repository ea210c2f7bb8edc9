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

// o = the sums of all pages, [rows][D].
inline void combine(const Layout& l, const Unit& u, float* o) {
    const int64_t D = l.dim, pages = u.pages();
    for (int64_t r = 0; r < u.rows; ++r) {
        const float *mass = &u.mass[r * pages], *size = &u.size[r * pages];
        auto add = [&](auto sum, auto load_centroid, auto load_sum) __attribute__((always_inline)) {
            for (int64_t page = 0; page < pages; ++page) {
                const auto scanned = load_centroid(&u.centroid[VALUES][page * D]) * mass[page] + load_sum(&u.sums[(page * u.rows + r) * D]) * size[page];
                sum = page ? sum + scanned : scanned;
            }
            return sum;
        };
        int64_t d = 0;
        for (; d + 16 <= D; d += 16)
            store16(o + r * D + d, add(Sixteen{}, [&](const float* x) { return load16(x + d); }, [&](const int32_t* x) { return __builtin_convertvector(load16(x + d), Sixteen); }));
        for (; d < D; ++d) o[r * D + d] = add(0.0f, [&](const float* x) { return x[d]; }, [&](const int32_t* x) { return float(x[d]); });
    }
}

inline const float* full_scales(const Layout& l, Side side, const Unit& u, const List& list, Workspace& s) {
    float* scale = room(s.full, list.count);
    for (int64_t i = 0; i < list.count; ++i) {
        uint16_t half;
        std::memcpy(&half, u.full_scale(l, side, list.tokens[i]), 2);
        scale[i] = half_to_float(half);
    }
    return scale;
}

// Scores of a list's tokens: [rows][count] by their full codes, or as scanned if there is nothing below.
inline void rescore(const Layout& l, const Queries& q, float noise_factor, const List& list, const Unit& u, float* refined, Workspace& s) {
    const int64_t D = l.dim, count = list.count, low = l.bits[KEYS] - l.scan_bits[KEYS], stride = code_stride(D);
    if (!low) {
        for (int64_t r = 0; r < list.rows; ++r)
            for (int64_t i = 0; i < count; ++i) refined[r * count + i] = u.scores[(list.row + r) * u.total + list.tokens[i]];
        return;
    }
    uint8_t* bytes = room(s.codes, count * stride);
    for (int64_t i = 0; i < count; ++i) read_low(u.low_bits(l, KEYS, list.tokens[i]), low, D, bytes + i * stride);
    int32_t* dots = room(s.dots, list.rows * count);
    const int8_t* operands = q.codes + (u.first + list.row) * D;
    token_dots(bytes, count, D, operands, list.rows, dots);
    const float* a = full_scales(l, KEYS, u, list, s);
    for (int64_t r = 0; r < list.rows; ++r) {
        const int64_t row = list.row + r;
        const float scale = q.scale[u.first + row], noise = q.norm2[u.first + row] * noise_factor, *base = &u.base[row * u.pages()];
        int32_t code_sum = 0;
        for (int64_t d = 0; d < D; ++d) code_sum += operands[r * D + d];
        float* to = refined + r * count;
        for (int64_t i = 0; i < count; ++i) to[i] = base[list.tokens[i] / l.tokens];
        for (int64_t i = 0; i < count; ++i) {
            // 2 code - (2^B - 1) = 2^low (2 top - (2^S - 1)) + 2 bits - (2^low - 1)
            const int32_t level = u.kept[row * count + i] * (1 << low) + 2 * dots[r * count + i] - ((1 << low) - 1) * code_sum;
            to[i] = (float(level) * scale * (a[i] * 0.5f) + noise * (a[i] * a[i])) + to[i];
        }
    }
}

// Integer weights of one row and page: the tokens left in p count by their scanned values.
template <int V>
inline void weigh_page(const Layout& l, Unit& u, int64_t page, int64_t r, float peak, int8_t* integers) {
    const int64_t at = r * u.total + page * l.tokens, of_page = r * u.pages() + page;
    Sixteen p[V];
    UNROLLED for (int i = 0; i < V; ++i) p[i] = load16(&u.p[at + 16 * i]);
    float factor = exp2_fast(u.shift[of_page] - peak);
    if (!(std::fabs(u.shift[of_page] - peak) < 32.0f)) {  // p may have lost what now counts
        UNROLLED for (int i = 0; i < V; ++i) p[i] = load16(&u.scores[at + 16 * i]);
        soften_row<V>(p, peak);
        factor = 1.0f;
    }
    u.mass[of_page] = sum_of<V>(p) * factor;
    u.size[of_page] = weigh_row<V>(p, &u.scale[VALUES][page * l.tokens], integers) * factor * level_unit(l.scan_bits[VALUES]);
}

// o += sum of weights times values of a list's tokens of one page, first .. last - 1, by their full codes. p [rows][count].
inline void add_refined(const Layout& l, const Unit& u, const List& list, int64_t first, int64_t last, const float* p, const float* a, Workspace& s, float* o) {
    const int64_t D = l.dim, count = last - first, padded = (count + 15) / 16 * 16, bits = l.bits[VALUES], scan = l.scan_bits[VALUES], stride = code_stride(D);
    uint8_t* codes = room(s.codes, count * stride);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token = list.tokens[first + i];
        const uint8_t* words = u.record[token / l.tokens] + l.planes[VALUES];
        read_low(u.low_bits(l, VALUES, token), bits - scan, D, codes + i * stride);
        for (int64_t plane = 0; plane < scan; ++plane) add_bits(words + plane * l.tokens * D / 8, D, token % l.tokens, 1 << (bits - 1 - plane), codes + i * stride);
    }
    int8_t* integers = room(s.integers, list.rows * padded);
    float *weight = room(s.weight, padded), *size = room(s.refined_size, list.rows);
    int32_t *sums = room(s.dots, list.rows * D), *shift = room(s.code_sums, list.rows);
    for (int64_t i = count; i < padded; ++i) weight[i] = 0.0f;
    for (int64_t r = 0; r < list.rows; ++r) {
        for (int64_t i = 0; i < count; ++i) weight[i] = p[r * list.count + first + i] * a[first + i];
        const float peak = max16(weight, padded), factor = peak < 7.9e-31f ? 0.0f : 127.0f / peak;
        for (int64_t i = 0; i < padded; i += 16) store_bytes(integers + r * padded + i, (SixteenInts)(load16(weight + i) * factor + ROUNDER));
        size[r] = peak / 127.0f * 0.5f;
        shift[r] = 0;
        for (int64_t i = 0; i < padded; ++i) shift[r] += integers[r * padded + i];
        shift[r] *= (1 << bits) - 1;
    }
    token_sums(codes, count, D, integers, padded, list.rows, sums);
    for (int64_t r = 0; r < list.rows; ++r) {
        const int32_t* sum = sums + r * D;
        float* to = o + (list.row + r) * D;
        for (int64_t d = 0; d < D; ++d) to[d] += float(2 * sum[d] - shift[r]) * size[r];
    }
}

// Moves p to the shift `peak` and gives the refined tokens theirs: their scanned values count.
inline void replace(Unit& u, int64_t page_tokens, float peak, int64_t row, const List& list, const float* p) {
    for (int64_t page = 0; page < u.pages(); ++page) {
        float &shift = u.shift[row * u.pages() + page], *of_page = &u.p[row * u.total + page * page_tokens];
        const bool lost = !(std::fabs(shift - peak) < 32.0f);
        const float factor = exp2_fast(shift - peak), *scores = &u.scores[row * u.total + page * page_tokens];
        for (int64_t t = 0; t < page_tokens; t += 16) store16(of_page + t, lost ? exp2_fast(load16(scores + t) - peak) : load16(of_page + t) * factor);
        shift = peak;
    }
    for (int64_t i = 0; i < list.count; ++i) u.p[row * u.total + list.tokens[i]] = p[i];
}

// Partials m, l [rows], o [rows][D] of a unit that was begun.
template <int V>
inline void finish(const Layout& l, const Queries& q, const Refinement& refine, Unit& u, Workspace& s, Ahead& ahead, float* m, float* l_out, float* o) {
    const bool apart = l.scan_bits[VALUES] < l.bits[VALUES];  // refined tokens have values of their own
    const int64_t pages = u.pages(), P = l.tokens;
    float* refined = room(s.refined, u.rows * (u.lists.empty() ? 0 : u.lists[0].count));
    for (const List& list : u.lists) {
        float* of_list = refined + list.row * list.count;
        rescore(l, q, refine.full_noise, list, u, of_list, s);
        for (int64_t r = 0; r < list.rows; ++r) {
            const int64_t row = list.row + r;
            float *scores = &u.scores[row * u.total], *to = of_list + r * list.count;
            for (int64_t i = 0; i < list.count; ++i) scores[list.tokens[i]] = -INFINITY, u.p[row * u.total + list.tokens[i]] = 0.0f;
            const float most = max16(to, list.count), left = max16(scores, u.total), peak = m[row] = most > left ? most : left;
            float mass = 0.0f;
            for (int64_t i = 0; i < list.count; ++i) to[i] = exp2_fast(to[i] - peak), mass += to[i];
            l_out[row] = apart ? mass : 0.0f;
            if (!apart) replace(u, P, peak, row, list, to);
        }
    }
    room(s.integers, u.rows * P);
    for (int64_t page = 0; page < pages; ++page) {
        u.load(l, VALUES, page);
        for (int64_t r = 0; r < u.rows; ++r) {
            ahead.step(12);
            weigh_page<V>(l, u, page, r, m[r], s.integers.data() + r * P);
            l_out[r] += u.mass[r * pages + page];
        }
        s.weights.set(l.scan_bits[VALUES], P / 4, s.integers.data(), P, u.rows);
        s.weights.dot(u.record[page] + l.planes[VALUES], l.dim / 8, &u.sums[page * u.rows * l.dim], l.dim, ahead);
    }
    if (apart)
        for (const List& list : u.lists)
            for (int64_t i = 0; i < list.count; ++i)
                for (int64_t r = list.row; r < list.row + list.rows; ++r)
                    u.mass[r * pages + list.tokens[i] / P] += refined[r * list.count + i];
    combine(l, u, o);
    if (!apart) return;
    for (const List& list : u.lists) {
        const float* a = full_scales(l, VALUES, u, list, s);
        for (int64_t first = 0, last; first < list.count; first = last) {
            last = first + 1;
            while (last < list.count && list.tokens[last] / P == list.tokens[first] / P) ++last;
            add_refined(l, u, list, first, last, refined + list.row * list.count, a, s, o);
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
