// Twin of `attend` in kernels/reference/attention.py for one granule and KV head: scan, select, refine, softmax, values.
// The integers are the reference's; sums of floats have one fixed order, so nothing depends on threads or on other granules.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "interface.hpp"
#include "level_dot.hpp"
#include "numbers.hpp"
#include "rotate.hpp"
#include "select.hpp"
#include "token_codes.hpp"

namespace {

using namespace bitkv;

inline float level_unit(int64_t bits) { return bits == 1 ? 1.0f : 0.5f; }

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

// Tokens to refine: a list for `rows` rows from `row` on, ascending.
struct List {
    int64_t row, rows, count;
    const int32_t* tokens;
};

// Room for one granule and head. Tokens count from the first valid page; the scales are those of the scanned planes.
struct Work {
    std::vector<const uint8_t*> record, words, bits;  // of the valid pages; their scanned keys; low bits of selected tokens
    std::vector<float> scale[2], centroid[2], scores, p, base, weights, product, peak, mass, selected_scale[2], row_scale;
    std::vector<int32_t> levels, sums, selected, code_sum, refined;
    std::vector<int64_t> end;
    std::vector<List> here;
    std::vector<int8_t> operands;
    std::vector<uint8_t> mark, gathered;
};

inline void load_page_metadata(const Layout& l, const Granule& granule, Work& w) {
    w.record.clear(), w.words.clear();
    for (int64_t page = 0; page < l.pages; ++page) {
        if (!granule.page_valid[page]) continue;
        w.record.push_back(granule.records + page * granule.page_stride);
        w.words.push_back(w.record.back() + l.planes[KEYS]);
    }
    const int64_t pages = int64_t(w.record.size());
    for (int side = 0; side < 2; ++side) {
        float *scale = room(w.scale[side], pages * l.tokens), *centroid = room(w.centroid[side], pages * l.dim);
        for (int64_t page = 0; page < pages; ++page) {
            halves_to_floats(w.record[page] + l.scan[side], l.tokens, scale + page * l.tokens);
            halves_to_floats(w.record[page] + l.centroid[side], l.dim, centroid + page * l.dim);
        }
    }
}

// The scanned fields of one side of a page that is needed soon.
inline void prefetch(const Layout& l, Side side, const uint8_t* record) {
    auto fetch = [&](int64_t offset, int64_t bytes) {
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(record + offset + at, 0, 2);
    };
    fetch(l.planes[side], l.scan_bits[side] * l.tokens * l.dim / 8);
    fetch(l.scan[side], 2 * l.tokens), fetch(l.centroid[side], 2 * l.dim);
}

// A group's rows of one query, `first` the number of the first among all queries.
struct Rows {
    int64_t count, first;
    const int8_t* codes;
};

// Scores of the scanned code; `levels` keeps their integers.
inline void score(const Layout& l, const Queries& q, const Refinement& refine, const Granule& granule, const Rows& rows, Work& w) {
    const int64_t P = l.tokens, D = l.dim, pages = int64_t(w.record.size()), total = pages * P;
    int32_t* levels = room(w.levels, rows.count * total);
    float *scores = room(w.scores, rows.count * total), *base = room(w.base, rows.count * pages), *product = room(w.product, D);
    const float unit = level_unit(l.scan_bits[KEYS]);
    level_dot(w.words.data(), pages, l.scan_bits[KEYS], D / 4, P / 8, rows.codes, D, rows.count, levels, total, [&](int64_t page) {
        if (granule.next) prefetch(l, KEYS, granule.next + page * granule.page_stride);
    });
    for (int64_t page = 0; page < pages; ++page) {
        const float *centroid = &w.centroid[KEYS][page * D], *a = &w.scale[KEYS][page * P];
        for (int64_t r = 0; r < rows.count; ++r) {
            const float *rotated = q.rotated + (rows.first + r) * D, scale = q.scale[rows.first + r], noise = q.norm2[rows.first + r] * refine.scan_noise;
            for (int64_t d = 0; d < D; ++d) product[d] = rotated[d] * centroid[d];
            const float c = base[r * pages + page] = fold_sum(product, D);
            const int32_t* level = levels + r * total + page * P;
            float* to = scores + r * total + page * P;
            for (int64_t t = 0; t < P; t += 16) {
                const Sixteen size = load16(a + t), coded = __builtin_convertvector(load16(level + t), Sixteen) * scale * (size * unit);
                store16(to + t, (coded + noise * (size * size)) + c);
            }
        }
    }
}

// Where the low bits of a token's code lie.
inline const uint8_t* low_bits(const Layout& l, Side side, const Work& w, int64_t token) {
    return w.record[token / l.tokens] + l.low[side] + token % l.tokens * ((l.bits[side] - l.scan_bits[side]) * l.dim / 8);
}

// Scales of the full codes of a list's tokens.
inline const float* full_scales(const Layout& l, Side side, const List& list, Work& w) {
    float* scale = room(w.selected_scale[side], list.count);
    for (int64_t i = 0; i < list.count; ++i)
        halves_to_floats(w.record[list.tokens[i] / l.tokens] + l.full[side] + 2 * (list.tokens[i] % l.tokens), 1, scale + i);
    return scale;
}

// What a list's tokens need that the scan did not read.
inline void prefetch(const Layout& l, const List& list, const Work& w) {
    for (int side = 0; side < 2; ++side) {
        const int64_t bytes = (l.bits[side] - l.scan_bits[side]) * l.dim / 8;
        for (int64_t i = 0; i < list.count && bytes; ++i) {
            const uint8_t* low = low_bits(l, Side(side), w, list.tokens[i]);
            __builtin_prefetch(low, 0, 3), __builtin_prefetch(low + bytes - 1, 0, 3);
            for (int64_t at = 64; at < bytes - 1; at += 64) __builtin_prefetch(low + at, 0, 3);
            __builtin_prefetch(w.record[list.tokens[i] / l.tokens] + l.full[side] + 2 * (list.tokens[i] % l.tokens), 0, 3);
        }
    }
}

// Scores of a list's tokens by their full codes.
inline void rescore(const Layout& l, const Queries& q, const Refinement& refine, const Rows& rows, const List& list, Work& w) {
    const int64_t P = l.tokens, D = l.dim, pages = int64_t(w.record.size()), total = pages * P, low = l.bits[KEYS] - l.scan_bits[KEYS];
    w.bits.clear();
    for (int64_t i = 0; i < list.count; ++i) w.bits.push_back(low_bits(l, KEYS, w, list.tokens[i]));
    int32_t* dots = room(w.refined, list.rows * list.count);
    token_dots(w.bits.data(), list.count, low, D, rows.codes + list.row * D, list.rows, dots);
    const float* a = full_scales(l, KEYS, list, w);
    for (int64_t r = 0; r < list.rows; ++r) {
        const int64_t row = list.row + r;
        const float scale = q.scale[rows.first + row], noise = q.norm2[rows.first + row] * refine.full_noise;
        int32_t code_sum = 0;
        for (int64_t d = 0; d < D; ++d) code_sum += rows.codes[row * D + d];
        for (int64_t i = 0; i < list.count; ++i) {
            const int64_t t = list.tokens[i];
            // 2 code - (2^B - 1) = 2^low (2 top - (2^S - 1)) + 2 bits - (2^low - 1)
            const int32_t level = w.levels[row * total + t] * (1 << low) + 2 * dots[r * list.count + i] - ((1 << low) - 1) * code_sum;
            w.scores[row * total + t] = (float(level) * scale * (a[i] * 0.5f) + noise * (a[i] * a[i])) + w.base[row * pages + t / P];
        }
    }
}

// Weights fp32 [P] -> integers 0..127; returns their scale, max / 127. Below 2^-100 a page cannot count beside the granule's largest
// weight, and the quotient would overflow.
inline float quantize_weights(const float* weights, int64_t tokens, int8_t* integers) {
    const float peak = max16(weights, tokens), factor = peak < 7.9e-31f ? 0.0f : 127.0f / peak;
    typedef int8_t SixteenBytes __attribute__((vector_size(16)));
    for (int64_t t = 0; t < tokens; t += 16) {  // the sum with ROUNDER ends in the integer
        const SixteenBytes bytes = __builtin_convertvector((SixteenInts)(load16(weights + t) * factor + ROUNDER), SixteenBytes);
        std::memcpy(integers + t, &bytes, sizeof bytes);
    }
    return peak / 127.0f;
}

// o += mass * centroid + sum of weights times scanned values of a page, for all rows; weights fp32 [rows][P], mass [rows].
inline void add_scanned(const Layout& l, int64_t page, int64_t rows, const float* weights, const float* mass, Work& w, float* o) {
    const int64_t P = l.tokens, D = l.dim;
    int8_t* operands = room(w.operands, rows * P);
    int32_t* sums = room(w.sums, rows * D);
    float* scale = room(w.row_scale, rows);
    for (int64_t r = 0; r < rows; ++r) scale[r] = quantize_weights(weights + r * P, P, operands + r * P) * level_unit(l.scan_bits[VALUES]);
    const uint8_t* words = w.record[page] + l.planes[VALUES];
    level_dot(&words, 1, l.scan_bits[VALUES], P / 4, D / 8, operands, P, rows, sums, D, [](int64_t) {});
    const float* centroid = &w.centroid[VALUES][page * D];
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < D; ++d) o[r * D + d] += mass[r] * centroid[d] + float(sums[r * D + d]) * scale[r];
}

// o += sum of weights times values of some tokens of one page by their full codes, for the rows of their list; `a`: their full scales.
inline void add_refined(const Layout& l, const List& list, const float* a, const float* p, int64_t stride, Work& w, float* o) {
    const int64_t P = l.tokens, D = l.dim, low = l.bits[VALUES] - l.scan_bits[VALUES], padded = (list.count + 15) / 16 * 16;
    uint8_t* bits = room(w.gathered, list.count * l.bits[VALUES] * D / 8);
    for (int64_t i = 0; i < list.count; ++i) {
        const uint8_t* words = w.record[list.tokens[i] / P] + l.planes[VALUES];
        uint8_t* to = bits + i * l.bits[VALUES] * D / 8;
        for (int64_t s = 0; s < l.scan_bits[VALUES]; ++s) value_bits(words + s * P * D / 8, D, list.tokens[i] % P, to + s * D / 8);
        std::memcpy(to + l.scan_bits[VALUES] * D / 8, low_bits(l, VALUES, w, list.tokens[i]), size_t(low * D / 8));
    }
    int8_t* operands = room(w.operands, list.rows * padded);
    float *weights = room(w.weights, padded), *scale = room(w.row_scale, list.rows);
    int32_t *sums = room(w.sums, list.rows * D), *offset = room(w.code_sum, list.rows);
    for (int64_t i = list.count; i < padded; ++i) weights[i] = 0.0f;
    for (int64_t r = 0; r < list.rows; ++r) {
        for (int64_t i = 0; i < list.count; ++i) weights[i] = p[(list.row + r) * stride + list.tokens[i]] * a[i];
        scale[r] = quantize_weights(weights, padded, operands + r * padded) * 0.5f;
        offset[r] = 0;
        for (int64_t i = 0; i < list.count; ++i) offset[r] += operands[r * padded + i];
        offset[r] *= (1 << l.bits[VALUES]) - 1;
    }
    token_sums(bits, list.count, l.bits[VALUES], D, operands, padded, list.rows, sums);
    for (int64_t r = 0; r < list.rows; ++r)
        for (int64_t d = 0; d < D; ++d) o[(list.row + r) * D + d] += float(2 * sums[r * D + d] - offset[r]) * scale[r];
}

// p = 2^(score - m) and m of every row. `shifted`: p holds 2^(score - peak) of the scores before the lists' tokens were scored again.
inline void weigh(const Rows& rows, int64_t total, const std::vector<List>& lists, bool shifted, Work& w, float* m) {
    for (int64_t r = 0; r < rows.count; ++r) {
        const float* scores = &w.scores[r * total];
        float* p = &w.p[r * total];
        m[r] = max16(scores, total);
        if (!shifted || !(std::fabs(w.peak[r] - m[r]) < 32.0f)) {
            exp2_shifted(scores, m[r], total, p);
            continue;
        }
        const float factor = exp2_fast(w.peak[r] - m[r]);
        for (int64_t t = 0; t < total; t += 16) store16(p + t, load16(p + t) * factor);
        for (int64_t i = 0; i < lists[0].count; ++i) p[lists[0].tokens[i]] = exp2_fast(scores[lists[0].tokens[i]] - m[r]);
    }
}

// Values of all pages: partials l, o of the rows from their weights p.
inline void add_values(const Layout& l, const Granule& granule, const Rows& rows, const std::vector<List>& lists, Work& w, float* l_out, float* o) {
    const int64_t P = l.tokens, pages = int64_t(w.record.size()), total = pages * P;
    const bool split = !lists.empty() && l.scan_bits[VALUES] < l.bits[VALUES];
    float* mass = room(w.mass, rows.count);
    std::vector<int64_t>& end = w.end;
    end.assign(lists.size(), 0);
    for (int64_t page = 0; page < pages; ++page) {
        if (granule.next) prefetch(l, VALUES, granule.next + page * granule.page_stride);
        float* weights = room(w.weights, rows.count * P);
        const float* a = &w.scale[VALUES][page * P];
        for (int64_t r = 0; r < rows.count; ++r) {
            const float* p = &w.p[r * total + page * P];
            mass[r] = sum16(p, P);
            l_out[r] += mass[r];
            for (int64_t t = 0; t < P; t += 16) store16(weights + r * P + t, load16(p + t) * load16(a + t));
        }
        w.here.clear();
        for (size_t i = 0; split && i < lists.size(); ++i) {
            const int64_t first = end[i];
            while (end[i] < lists[i].count && lists[i].tokens[end[i]] < (page + 1) * P) ++end[i];
            if (end[i] == first) continue;
            w.here.push_back({lists[i].row, lists[i].rows, end[i] - first, lists[i].tokens + first});
            for (int64_t r = lists[i].row; r < lists[i].row + lists[i].rows; ++r)
                for (int64_t j = first; j < end[i]; ++j) weights[r * P + lists[i].tokens[j] - page * P] = 0.0f;
        }
        add_scanned(l, page, rows.count, weights, mass, w, o);
        for (const List& list : w.here) add_refined(l, list, full_scales(l, VALUES, list, w), w.p.data(), total, w, o);
    }
}

// Tokens in any of the lists.
inline int64_t count_refined(const std::vector<List>& lists, int64_t total, Work& w) {
    uint8_t* mark = room(w.mark, total);
    std::memset(mark, 0, size_t(total));
    int64_t refined = 0;
    for (const List& list : lists)
        for (int64_t i = 0; i < list.count; ++i) refined += !mark[list.tokens[i]], mark[list.tokens[i]] = 1;
    return refined;
}

inline int64_t attend(const Layout& l, const Queries& q, int64_t head, const Granule& granule, const Refinement& refine, PartialOut out) {
    thread_local Work w;
    thread_local std::vector<List> lists;
    load_page_metadata(l, granule, w);
    const int64_t D = l.dim, G = q.group, total = int64_t(w.record.size()) * l.tokens;
    const int64_t chosen = std::min<int64_t>(total, std::max<int64_t>(refine.min_tokens, int64_t(std::ceil(double(total) * refine.share))));
    int64_t refined = 0;
    for (int64_t query = 0; query < q.count; ++query) {
        float *m = out.m + query * G, *sum = out.l + query * G, *o = out.o + query * G * D;
        std::fill_n(sum, G, 0.0f);
        std::fill_n(o, G * D, 0.0f);
        if (total == 0) {
            std::fill_n(m, G, -INFINITY);
            continue;
        }
        const int64_t first = (head * q.count + query) * G;
        const Rows rows = {G, first, q.codes + first * D};
        score(l, q, refine, granule, rows, w);
        room(w.p, G * total);
        lists.clear();
        bool shifted = false;
        if (refine.enabled) {
            const int64_t apart = refine.group ? 1 : G;
            int32_t* tokens = room(w.selected, apart * chosen);
            shifted = select(G, total, w.scores.data(), refine.group != 0, chosen, tokens, room(w.peak, G), w.p.data());
            for (int64_t i = 0; i < apart; ++i) lists.push_back({i, G / apart, chosen, tokens + i * chosen});
            for (const List& list : lists) prefetch(l, list, w);
            if (l.scan_bits[KEYS] < l.bits[KEYS])
                for (const List& list : lists) rescore(l, q, refine, rows, list, w);
            refined += count_refined(lists, total, w);
        }
        weigh(rows, total, lists, shifted, w, m);
        add_values(l, granule, rows, lists, w, sum, o);
    }
    return refined;
}

}  // namespace
