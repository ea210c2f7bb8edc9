// Twin of the attention of bitkv_dist/codec/worded.py: what words leave over of a few tokens stands behind them in bit planes.
// Each code is used by itself and in floating point: they are one token in twenty.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "rotate.hpp"
#include "select.hpp"
#include "token_codes.hpp"
#include "unit.hpp"
#include "words.hpp"

namespace {

struct LeftRoom {
    Room<float> turned, log_sum_exp, level, sums;  // queries in the planes' space [rows][D]; [rows]; [D]; values' sums there [rows][D]
    Room<float> base, mass;  // [rows][pages]: products with the means of the pages, and what the chosen tokens' p amount to
    Room<int32_t> keys, some, chosen;
    Room<uint8_t> codes;
    std::vector<List> lists;
};

// The record of a page in the planes behind its words.
inline const uint8_t* left_record(const WordHead& h, const WordUnit& u, int64_t page) { return u.page[page] + h.head * h.w.record_bytes + h.w.left_at; }

inline float scale_of(const Layout& l, Side side, const uint8_t* record, int64_t token) {
    uint16_t half;
    std::memcpy(&half, record + l.scan[side] + 2 * token, 2);
    return half_to_float(half) * level_unit(l.bits[side]);
}

// The levels of a token's codes, odd integers.
inline const float* levels_of(const Layout& l, Side side, const uint8_t* record, int64_t token, LeftRoom& s) {
    const int64_t dim = l.dim, bits = l.bits[side], width = l.tokens / 8;
    uint8_t* codes = room(s.codes, code_stride(dim));
    std::fill_n(codes, code_stride(dim), uint8_t(0));
    for (int64_t plane = 0; plane < bits; ++plane) {
        const uint8_t* words = record + l.planes[side] + plane * l.tokens * dim / 8;
        if (side == VALUES) {
            add_bits(words, dim, token, 1 << (bits - 1 - plane), codes);
            continue;
        }
        words += token % width * 4;  // bit 8 b + j of word [k][i] is dim 4 k + b of token i + width j
        for (int64_t k = 0; k < dim / 4; ++k) {
            uint32_t word, code;
            std::memcpy(&word, words + 4 * k * width, 4), std::memcpy(&code, codes + 4 * k, 4);
            code = 2 * code + ((word >> (token / width)) & 0x01010101u);
            std::memcpy(codes + 4 * k, &code, 4);
        }
    }
    float* level = room(s.level, code_stride(dim));
    const int32_t less = (1 << bits) - 1;
    for (int64_t d = 0; d < dim; ++d) level[d] = float(2 * int32_t(codes[d]) - less);
    return level;
}

// Queries in the space of the planes.
inline void rotate_queries(const WordHead& h, LeftRoom& s) {
    const int64_t dim = h.w.dim;
    float* turned = room(s.turned, h.rows * dim);
    std::copy_n(h.q, h.rows * dim, turned);
    for (int64_t r = 0; r < h.rows; ++r) rotate(dim, 1, turned + r * dim, h.w.signs[KEYS] + h.head * dim);
}

// Has the planes of some tokens' values fetched.
inline void expect_values(const WordHead& h, WordUnit& u, const int32_t* tokens, int64_t count) {
    const Layout& l = h.w.left;
    const int64_t bits = l.bits[VALUES], bytes = l.dim / 2;
    u.ahead.expect(count * (bits + 1), bytes);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t within = tokens[i] % l.tokens;
        const uint8_t* record = left_record(h, u, tokens[i] / l.tokens);
        for (int64_t plane = 0; plane < bits; ++plane) u.ahead.add(record + l.planes[VALUES] + plane * l.tokens * l.dim / 8 + within / 4 * bytes, bytes);
        u.ahead.add(record + l.scan[VALUES] + 2 * within, 2);
    }
}

// Which tokens: the rule of kernels/reference/selection.py over the words' scores.
inline void choose_left(const WordHead& h, const Refinement& refine, WordUnit& u, LeftRoom& s) {
    const int64_t share = int64_t(std::ceil(double(u.total) * refine.share)), count = std::min(u.total, std::max(refine.min_tokens, share));
    const int64_t lists = refine.group ? 1 : h.rows;
    float* log_sums = room(s.log_sum_exp, h.rows);
    if (refine.group && h.rows > 1) {
        float* p = room(s.sums, std::max(u.total, h.rows * h.w.dim));
        for (int64_t r = 0; r < h.rows; ++r) {
            const float* scores = &u.scores[r * u.total];
            const float peak = max16(scores, u.total);
            log_sums[r] = peak + std::log2(exp2_shifted(scores, peak, u.total, p));
        }
    }
    int32_t* tokens = room(s.chosen, lists * count + 16);
    select(h.rows, u.total, u.scores.data(), log_sums, refine.group != 0, count, room(s.keys, u.total), room(s.some, u.total + 16), tokens);
    s.lists.clear();
    for (int64_t i = 0; i < lists; ++i) s.lists.push_back({i, h.rows / lists, count, tokens + i * count});
    expect_values(h, u, tokens, lists * count);
}

inline float product(const float* a, const float* b, int64_t dim) {
    Sixteen sum = {};
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) sum = fused(load16(a + d), load16(b + d), sum);
    if (d < dim) sum = fused(load_part(a + d, dim - d, 0.0f), load_part(b + d, dim - d, 0.0f), sum);
    return fold16(sum);
}

// Scores of the chosen tokens: of their words, without a correction, and what planes add.
inline void rescore_left(const WordHead& h, WordUnit& u, LeftRoom& s) {
    const Layout& l = h.w.left;
    const int64_t dim = l.dim, pages = u.pages();
    const float* turned = s.turned.data();
    float *base = room(s.base, h.rows * pages), *center = room(s.level, code_stride(dim));
    for (int64_t page = 0; page < pages; ++page) {
        halves_to_floats(left_record(h, u, page) + l.centroid[KEYS], dim, center);
        for (int64_t r = 0; r < h.rows; ++r) base[r * pages + page] = product(turned + r * dim, center, dim);
    }
    for (const List& list : s.lists)
        for (int64_t i = 0; i < list.count; ++i) {
            const int64_t token = list.tokens[i], page = token / l.tokens, within = token % l.tokens;
            const uint8_t* record = left_record(h, u, page);
            const float *level = levels_of(l, KEYS, record, within, s), scale = scale_of(l, KEYS, record, within);
            for (int64_t r = list.row; r < list.row + list.rows; ++r)
                u.scores[r * u.total + token] = u.raw[r * u.total + token] + (product(turned + r * dim, level, dim) * scale + base[r * pages + page]);
        }
}

// Adds to o [rows][D] what planes add to the values of the chosen tokens.
inline void add_left(const WordHead& h, const WordUnit& u, LeftRoom& s, float* o) {
    const Layout& l = h.w.left;
    const int64_t dim = l.dim, pages = u.pages();
    float *sums = room(s.sums, h.rows * dim), *mass = room(s.mass, h.rows * pages);
    std::fill_n(sums, h.rows * dim, 0.0f), std::fill_n(mass, h.rows * pages, 0.0f);
    const auto add = [&](float by, const float* x, float* to) {
        for (int64_t d = 0; d < dim; ++d) to[d] += by * x[d];
    };
    for (const List& list : s.lists)
        for (int64_t i = 0; i < list.count; ++i) {
            const int64_t token = list.tokens[i], page = token / l.tokens, within = token % l.tokens;
            const uint8_t* record = left_record(h, u, page);
            const float *level = levels_of(l, VALUES, record, within, s), scale = scale_of(l, VALUES, record, within);
            for (int64_t r = list.row; r < list.row + list.rows; ++r) {
                const float p = u.p[r * u.total + token];
                mass[r * pages + page] += p, add(p * scale, level, sums + r * dim);
            }
        }
    float* center = room(s.level, code_stride(dim));
    for (int64_t page = 0; page < pages; ++page) {
        halves_to_floats(left_record(h, u, page) + l.centroid[VALUES], dim, center);
        for (int64_t r = 0; r < h.rows; ++r) add(mass[r * pages + page], center, sums + r * dim);
    }
    for (int64_t r = 0; r < h.rows; ++r) {
        rotate_back(dim, sums + r * dim, h.w.signs[VALUES] + h.head * dim);
        for (int64_t d = 0; d < dim; ++d) o[r * dim + d] += sums[r * dim + d];
    }
}

// Tokens in any of the lists.
inline int64_t count_left(const WordUnit& u, const LeftRoom& s) {
    if (s.lists.size() == 1) return s.lists[0].count;
    std::vector<uint8_t> mark(u.total);
    int64_t found = 0;
    for (const List& list : s.lists)
        for (int64_t i = 0; i < list.count; ++i) found += !mark[list.tokens[i]], mark[list.tokens[i]] = 1;
    return found;
}

// One KV head of some granules, whose pages are page_stride bytes apart; q fp32 [rows][D] in base 2. Partials [count][rows]; page_mass
// [count][rows][pages] may be null. Returns the tokens refined.
inline int64_t attend_words(const Words& w, int64_t rows, const float* q, int64_t head, const Granule* granules, int64_t count, int64_t page_stride, const Refinement& refine, PartialOut out) {
    struct Own {
        WordUnit unit;
        LeftRoom left;
    };
    thread_local Own of_thread;
    auto& [u, left] = of_thread;
    const WordHead h = {w, head, rows, q};
    int64_t refined = 0;
    pair_queries(h, u);
    if (refine.enabled) rotate_queries(h, left);
    const bool others = u.book != h.book(KEYS, 0);
    if (others) expect_book(h, KEYS, 0, u);
    if (count) expect_records(h, granules[0], page_stride, u);
    u.ahead.step(64);
    u.book = h.book(KEYS, 0);
    for (int64_t i = 0; i < count; ++i) {
        if (i) u.ahead.finish();
        u.first = others && i == 0;
        if (i + 1 < count) expect_records(h, granules[i + 1], page_stride, u);
        float *m = out.m + i * rows, *l = out.l + i * rows, *o = out.o + i * rows * w.dim;
        u.start(w, granules[i], page_stride);
        if (u.total == 0) {
            std::fill_n(m, rows, -INFINITY), std::fill_n(l, rows, 0.0f), std::fill_n(o, rows * w.dim, 0.0f);
        } else {
            score_words(h, u);
            if (refine.enabled) choose_left(h, refine, u, left), rescore_left(h, u, left), refined += count_left(u, left);
            soften_words(h, u, m, l);
            sum_words(h, u, l, o);
            if (refine.enabled) add_left(h, u, left, o);
        }
        if (out.page_mass) tell_page_mass(w, u, rows, granules[i].page_valid, out.page_mass + i * rows * w.pages);
    }
    u.ahead.finish();
    return refined;
}

}  // namespace
