// Twin of the attention of bitkv_dist/codec/worded.py: what words leave over of a few tokens stands behind them in bit planes.
// Each code is used by itself and in floating point: they are one token in twenty.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "rotate.hpp"
#include "unit.hpp"
#include "words.hpp"

namespace {

inline void select_positions(int64_t rows, int64_t total, const float* scores, bool group, int64_t count, int32_t* positions);  // table.hpp

// Tokens to refine for `rows` rows from `row` on, ascending.
struct Chosen {
    int64_t row, rows, count;
    const int32_t* tokens;
};

struct LeftRoom {
    Room<float> turned, level, sums;  // queries in the planes' space [rows][D]; [D]; values' sums there [rows][D]
    Room<float> base, mass;  // [rows][pages]: products with the means of the pages, and what the chosen tokens' p amount to
    Room<int32_t> chosen;
    Room<uint8_t> codes;
    std::vector<Chosen> lists;
};

// The record of a page in the planes behind its words.
inline const uint8_t* left_record(const WordHead& h, const WordUnit& u, int64_t page) { return u.page[page] + h.head * h.w.record_bytes + h.w.left_at; }

inline float scale_of(const Layout& l, Side side, const uint8_t* record, int64_t token) {
    uint16_t half;
    std::memcpy(&half, record + l.scan[side] + 2 * token, 2);
    return half_to_float(half) * level_unit(l.bits[side]);
}

// codes[0..7] = 2 codes + bit `shift` of the bytes of `word`, eight at a time.
inline void append_bits(uint64_t word, int64_t shift, uint8_t* codes) {
    uint64_t code;
    std::memcpy(&code, codes, 8);
    code = 2 * code + ((word >> shift) & 0x0101010101010101u);
    std::memcpy(codes, &code, 8);
}

// Appends a plane's bits of one token to codes [D]. Keys, words [D/4][P/8]: bit 8 b + j of word [k][i] is dim 4 k + b of token i + (P/8) j.
inline void append_key_bits(const uint8_t* words, int64_t tokens, int64_t dim, int64_t token, uint8_t* codes) {
    const int64_t width = tokens / 8, stride = 4 * width, shift = token / width;
    words += 4 * (token % width);
    for (int64_t k = 0; k < dim / 4; k += 2) {
        uint32_t word[2];
        std::memcpy(word, words + k * stride, 4), std::memcpy(word + 1, words + (k + 1) * stride, 4);
        append_bits(word[0] | uint64_t(word[1]) << 32, shift, codes + 4 * k);
    }
}

// Values, words [P/4][D/8]: bit 8 b + j of word [u][i] is token 4 u + b of dim i + (D/8) j.
inline void append_value_bits(const uint8_t* words, int64_t dim, int64_t token, uint8_t* codes) {
    const int64_t width = dim / 8;
    const uint8_t* bytes = words + token / 4 * 4 * width + token % 4;
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
        uint64_t eight = 0;
        for (int64_t k = 0; k < 8; ++k) eight |= uint64_t(bytes[4 * (i + k)]) << (8 * k);
        for (int64_t j = 0; j < 8; ++j) append_bits(eight, j, codes + j * width + i);
    }
    for (; i < width; ++i)
        for (int64_t j = 0; j < 8; ++j) codes[j * width + i] = uint8_t(2 * codes[j * width + i] + ((bytes[4 * i] >> j) & 1));
}

// The levels of a token's codes, odd integers.
inline const float* levels_of(const Layout& l, Side side, const uint8_t* record, int64_t token, LeftRoom& s) {
    const int64_t dim = l.dim, bits = l.bits[side];
    uint8_t* codes = room(s.codes, dim);
    std::fill_n(codes, dim, uint8_t(0));
    for (int64_t plane = 0; plane < bits; ++plane) {
        const uint8_t* words = record + l.planes[side] + plane * l.tokens * dim / 8;
        if (side == KEYS) append_key_bits(words, l.tokens, dim, token, codes);
        else append_value_bits(words, dim, token, codes);
    }
    float* level = room(s.level, dim);
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
    int32_t* tokens = room(s.chosen, lists * count + 16);
    select_positions(h.rows, u.total, u.scores.data(), refine.group != 0, count, tokens);
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
    float *base = room(s.base, h.rows * pages), *center = room(s.level, dim);
    for (int64_t page = 0; page < pages; ++page) {
        halves_to_floats(left_record(h, u, page) + l.centroid[KEYS], dim, center);
        for (int64_t r = 0; r < h.rows; ++r) base[r * pages + page] = product(turned + r * dim, center, dim);
    }
    for (const Chosen& list : s.lists)
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
    for (const Chosen& list : s.lists)
        for (int64_t i = 0; i < list.count; ++i) {
            const int64_t token = list.tokens[i], page = token / l.tokens, within = token % l.tokens;
            const uint8_t* record = left_record(h, u, page);
            const float *level = levels_of(l, VALUES, record, within, s), scale = scale_of(l, VALUES, record, within);
            for (int64_t r = list.row; r < list.row + list.rows; ++r) {
                const float p = u.p[r * u.total + token];
                mass[r * pages + page] += p, add(p * scale, level, sums + r * dim);
            }
        }
    float* center = room(s.level, dim);
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
    for (const Chosen& list : s.lists)
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
