// Twin of `attend` in kernels/reference/attention.py for one granule and KV head: scan, select, refine, softmax, values.
// The integers are the reference's; sums of floats have one fixed order, so nothing depends on threads or on other granules.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "interface.hpp"
#include "numbers.hpp"
#include "plane_dot.hpp"
#include "rotate.hpp"
#include "select.hpp"

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

// Room for one granule and head. Tokens count from the first valid page; the scales are those of the scanned planes.
struct Work {
    std::vector<const uint8_t*> record;  // of the valid pages
    std::vector<float> key_scale, value_scale, key_centroid, value_centroid;
    std::vector<int32_t> dots, top, selected, code_sum, integers[2];
    std::vector<float> scores, p, base, weight, product;
    std::vector<int8_t> operands[2];
    std::vector<uint8_t> mark;
};

inline void load_page_metadata(const Layout& l, const Granule& granule, Work& w) {
    w.record.clear();
    for (int64_t page = 0; page < l.pages; ++page)
        if (granule.page_valid[page]) w.record.push_back(granule.records + page * granule.page_stride);
    const int64_t pages = int64_t(w.record.size());
    for (int side = 0; side < 2; ++side) {
        float* scan = room(side == KEYS ? w.key_scale : w.value_scale, pages * l.tokens);
        float* centroid = room(side == KEYS ? w.key_centroid : w.value_centroid, pages * l.dim);
        for (int64_t page = 0; page < pages; ++page) {
            halves_to_floats(w.record[page] + l.scan[side], l.tokens, scan + page * l.tokens);
            halves_to_floats(w.record[page] + l.centroid[side], l.dim, centroid + page * l.dim);
        }
    }
}

// The scale of a token's full code: read for refined tokens only.
inline float full_scale(const Layout& l, Side side, const uint8_t* record, int64_t token) {
    float scale;
    halves_to_floats(record + l.full[side] + 2 * token, 1, &scale);
    return scale;
}

// The scanned fields of a page that is needed soon.
inline void prefetch_page(const Layout& l, const uint8_t* record) {
    auto fetch = [&](int64_t offset, int64_t bytes) {
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(record + offset + at, 0, 2);
    };
    for (int side = 0; side < 2; ++side) {
        fetch(l.planes[side], l.scan_bits[side] * l.tokens * l.dim / 8);
        fetch(l.scan[side], 2 * l.tokens), fetch(l.centroid[side], 2 * l.dim);
    }
}

// out[r][i] = sum of operands times the scanned codes, planes weighted 2^(S-1) .. 1: of keys (i = token) or values (i = dim) of a page.
inline void scan(const Layout& l, Side side, const uint8_t* record, const int8_t* operands, int64_t rows, Work& w, int32_t* out, int64_t out_stride) {
    const int64_t height = (side == KEYS ? l.dim : l.tokens) / 4, width = (side == KEYS ? l.tokens : l.dim) / 8;
    const uint8_t* plane = record + l.planes[side];
    plane_dot(plane, height, width, operands, 4 * height, rows, out, out_stride);
    for (int64_t s = 1; s < l.scan_bits[side]; ++s) {
        int32_t* dots = room(w.dots, rows * 8 * width);
        plane_dot(plane + s * 4 * height * width, height, width, operands, 4 * height, rows, dots, 8 * width);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < 8 * width; ++i) out[r * out_stride + i] = 2 * out[r * out_stride + i] + dots[r * 8 * width + i];
    }
}

// One query's group of rows: what its scores and values have in common.
struct Rows {
    int64_t count, first;  // rows first .. first + count - 1 of the queries
    const int8_t* codes;
    bool lists;  // of selected tokens: one per row, else one for all
    int64_t selected;  // tokens in a list
};

inline void score(const Layout& l, const Queries& q, const Refinement& refine, const Granule& granule, const Rows& rows, Work& w) {
    const int64_t P = l.tokens, D = l.dim, pages = int64_t(w.record.size()), total = pages * P;
    int32_t *top = room(w.top, rows.count * total), *code_sum = room(w.code_sum, rows.count);
    float *scores = room(w.scores, rows.count * total), *base = room(w.base, rows.count * pages), *product = room(w.product, D);
    const int32_t middle = (1 << l.scan_bits[KEYS]) - 1;
    const float unit = level_unit(l.scan_bits[KEYS]);
    for (int64_t r = 0; r < rows.count; ++r) {
        code_sum[r] = 0;
        for (int64_t d = 0; d < D; ++d) code_sum[r] += rows.codes[r * D + d];
    }
    for (int64_t page = 0; page < pages; ++page) {
        if (granule.next) prefetch_page(l, granule.next + page * granule.page_stride);
        scan(l, KEYS, w.record[page], rows.codes, rows.count, w, top + page * P, total);
        const float *centroid = &w.key_centroid[page * D], *a = &w.key_scale[page * P];
        for (int64_t r = 0; r < rows.count; ++r) {
            const float *rotated = q.rotated + (rows.first + r) * D, scale = q.scale[rows.first + r], noise = q.norm2[rows.first + r] * refine.scan_noise;
            for (int64_t d = 0; d < D; ++d) product[d] = rotated[d] * centroid[d];
            const float c = base[r * pages + page] = fold_sum(product, D);
            const int32_t *dots = top + r * total + page * P, offset = middle * code_sum[r];
            float* to = scores + r * total + page * P;
            for (int64_t t = 0; t < P; ++t) to[t] = (float(2 * dots[t] - offset) * scale * (a[t] * unit) + noise * (a[t] * a[t])) + c;
        }
    }
}

// Selected tokens, their scores by the full code, and how many there are in any row.
inline int64_t rescore(const Layout& l, const Queries& q, const Refinement& refine, const Rows& rows, Work& w) {
    const int64_t P = l.tokens, D = l.dim, pages = int64_t(w.record.size()), total = pages * P, lists = rows.lists ? rows.count : 1;
    const int64_t low[2] = {l.bits[KEYS] - l.scan_bits[KEYS], l.bits[VALUES] - l.scan_bits[VALUES]};
    int32_t* selected = room(w.selected, lists * rows.selected);
    select(rows.count, total, w.scores.data(), !rows.lists, rows.selected, selected);
    auto row_of = [&](int side, int64_t t) { return w.record[t / P] + l.low[side] + t % P * (low[side] * D / 8); };
    for (int64_t i = 0; i < lists * rows.selected; ++i)
        for (int side = 0; side < 2; ++side)
            for (int64_t at = 0; at < low[side] * D / 8; at += 64) __builtin_prefetch(row_of(side, selected[i]) + at, 0, 3);
    const int32_t middle = (1 << l.bits[KEYS]) - 1;
    for (int64_t r = 0; r < rows.count && low[KEYS]; ++r) {
        const float scale = q.scale[rows.first + r], noise = q.norm2[rows.first + r] * refine.full_noise;
        const int32_t* list = selected + (rows.lists ? r * rows.selected : 0);
        for (int64_t i = 0; i < rows.selected; ++i) {
            const int64_t t = list[i];
            const int32_t dot = w.top[r * total + t] * (1 << low[KEYS]) + low_dot(row_of(KEYS, t), low[KEYS], D, rows.codes + r * D);
            const float integer = float(2 * dot - middle * w.code_sum[r]), a = full_scale(l, KEYS, w.record[t / P], t % P);
            w.scores[r * total + t] = (integer * scale * (a * 0.5f) + noise * (a * a)) + w.base[r * pages + t / P];
        }
    }
    if (!rows.lists) return rows.selected;
    uint8_t* mark = room(w.mark, total);
    std::memset(mark, 0, size_t(total));
    int64_t refined = 0;
    for (int64_t i = 0; i < lists * rows.selected; ++i) refined += !mark[selected[i]], mark[selected[i]] = 1;
    return refined;
}

// Weights fp32 [P] -> operands 0..127 of plane_dot; returns their scale, max / 127. Below 2^-100 a page cannot count beside the
// granule's largest weight, and the quotient would overflow.
inline float quantize_weights(const float* weights, int64_t tokens, int8_t* operands, int32_t* sum) {
    const float peak = max16(weights, tokens), factor = peak < 7.9e-31f ? 0.0f : 127.0f / peak;
    int32_t total = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        const int32_t integer = round_int(weights[t] * factor);
        operands[t] = int8_t(integer);
        total += integer;
    }
    *sum = total;
    return peak / 127.0f;
}

// o += sum over the page of p times value; `at` and `end` bound the part of each list of selected tokens that lies in this page.
inline void add_values(const Layout& l, int64_t page, const Rows& rows, bool split, const int64_t* at, const int64_t* end, Work& w, float* l_out, float* o) {
    const int64_t P = l.tokens, D = l.dim, total = int64_t(w.record.size()) * P, low = l.bits[VALUES] - l.scan_bits[VALUES];
    const float *centroid = &w.value_centroid[page * D], *scan_scale = &w.value_scale[page * P];
    float *weight = room(w.weight, P), *mass = room(w.base, 3 * rows.count), *scale[2] = {mass + rows.count, mass + 2 * rows.count};
    int32_t* offset = room(w.code_sum, 2 * rows.count);
    int8_t* operands[2] = {room(w.operands[0], rows.count * P), room(w.operands[1], rows.count * P)};
    int32_t* integers[2] = {room(w.integers[0], rows.count * D), room(w.integers[1], rows.count * D)};
    for (int64_t r = 0; r < rows.count; ++r) {
        const float* p = &w.p[r * total + page * P];
        mass[r] = sum16(p, P);
        l_out[r] += mass[r];
        for (int64_t t = 0; t < P; ++t) weight[t] = p[t] * scan_scale[t];
        const int64_t list = rows.lists ? r : 0;
        const int32_t* selected = w.selected.data() + list * rows.selected;
        if (split) for (int64_t i = at[list]; i < end[list]; ++i) weight[selected[i] - page * P] = 0.0f;
        scale[0][r] = quantize_weights(weight, P, operands[0] + r * P, offset + r) * level_unit(l.scan_bits[VALUES]);
        if (!split) continue;
        std::memset(weight, 0, size_t(P) * sizeof(float));
        for (int64_t i = at[list]; i < end[list]; ++i) {
            const int64_t t = selected[i] - page * P;
            weight[t] = p[t] * full_scale(l, VALUES, w.record[page], t);
        }
        scale[1][r] = quantize_weights(weight, P, operands[1] + r * P, offset + rows.count + r) * 0.5f;
    }
    for (int pass = 0; pass < (split ? 2 : 1); ++pass) {
        scan(l, VALUES, w.record[page], operands[pass], rows.count, w, integers[pass], D);
        const int32_t middle = (1 << (pass ? l.bits : l.scan_bits)[VALUES]) - 1;
        if (pass) {
            for (int64_t i = 0; i < rows.count * D; ++i) integers[1][i] *= 1 << low;
            low_values(w.record[page] + l.low[VALUES], low, D, operands[1], P, rows.count, integers[1]);
        }
        for (int64_t r = 0; r < rows.count; ++r) {
            const float s = scale[pass][r], c = pass ? 0.0f : mass[r];
            const int32_t *code = integers[pass] + r * D, shift = middle * offset[pass * rows.count + r];
            float* to = o + r * D;
            if (pass) for (int64_t d = 0; d < D; ++d) to[d] += float(2 * code[d] - shift) * s;
            else for (int64_t d = 0; d < D; ++d) to[d] += c * centroid[d] + float(2 * code[d] - shift) * s;
        }
    }
}

inline int64_t attend(const Layout& l, const Queries& q, int64_t head, const Granule& granule, const Refinement& refine, PartialOut out) {
    thread_local Work w;
    load_page_metadata(l, granule, w);
    const int64_t P = l.tokens, D = l.dim, G = q.group, pages = int64_t(w.record.size()), total = pages * P;
    const int64_t chosen = std::min<int64_t>(total, std::max<int64_t>(refine.min_tokens, int64_t(std::ceil(double(total) * refine.share))));
    const bool lists = !refine.group && G > 1, split = refine.enabled && l.scan_bits[VALUES] < l.bits[VALUES];
    std::vector<int64_t> at(G), end(G);
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
        const Rows rows = {G, first, q.codes + first * D, lists, chosen};
        score(l, q, refine, granule, rows, w);
        if (refine.enabled) refined += rescore(l, q, refine, rows, w);
        float* p = room(w.p, G * total);
        for (int64_t r = 0; r < G; ++r) {
            m[r] = max16(&w.scores[r * total], total);
            exp2_shifted(&w.scores[r * total], m[r], total, p + r * total);
        }
        std::fill(end.begin(), end.end(), 0);
        for (int64_t page = 0; page < pages; ++page) {
            for (int64_t list = 0; split && list < (lists ? G : 1); ++list) {
                at[list] = end[list];
                while (end[list] < chosen && w.selected[list * chosen + end[list]] < (page + 1) * P) ++end[list];
            }
            add_values(l, page, rows, split, at.data(), end.data(), w, sum, o);
        }
    }
    return refined;
}

}  // namespace
