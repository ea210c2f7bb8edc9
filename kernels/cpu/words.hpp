// Twin of the attention of bitkv_dist/codec/tailored.py: keys and values rebuilt from looked-up words, keys turned by RoPE.
// One unit is one granule, one KV head, its group's query rows. A query is turned back by the angle of each page, once, and a key by that of
// its place in the page; a book is gone through with all tokens of a granule while it lies in the nearest cache. Sums of floats have one
// fixed order, so nothing depends on threads or on other granules.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ahead.hpp"
#include "book_words.hpp"
#include "interface.hpp"
#include "numbers.hpp"
#include "room.hpp"
#include "weigh.hpp"

namespace {

using namespace bitkv;

// One KV head's part of Words and its queries, fp32 [rows][D].
struct WordHead {
    const Words& w;
    int64_t head, rows;
    const float* q;

    int64_t groups() const { return w.dim / WORD; }
    const uint8_t* book(Side side, int64_t group) const {
        return reinterpret_cast<const uint8_t*>(w.words[side] + (((head * groups() + group) << w.bits[side]) * WORD));
    }
    const float* factor(Side side) const { return w.factor[side] + head * w.dim; }
    const float* center(Side side) const { return w.center[side] ? w.center[side] + head * w.dim : nullptr; }
    const int32_t* channels(Side side) const { return w.channels[side] + head * w.dim; }
};

// Tokens count from the first valid page.
struct WordUnit {
    int64_t total;
    std::vector<const uint8_t*> page;  // the first head's record of each valid page
    const uint8_t* book = nullptr;  // the first of the head that was attended to last
    bool first;  // of a head: its books have to be fetched
    Ahead ahead;
    Room<uint16_t> at;  // [groups][total]
    Room<float> paired, cosine, turned;  // queries by place in the groups [2][rows][D/2]; a page's cosines and sines [2][D/2]; [pages][2][rows][D/2]
    Room<float> turns;  // see copy_turns
    Room<float> scale, raw, scores, p, mass;  // [total]; [rows][total] three times; [rows][pages]
    Room<float> sums;  // [rows][D + WORD], by place in the groups, of which two may be written at once

    void start(const Words& w, const Granule& granule, int64_t page_stride) {
        page.clear();
        for (int64_t i = 0; i < w.pages; ++i)
            if (granule.page_valid[i]) page.push_back(granule.records + i * page_stride);
        total = pages() * w.tokens;
    }

    int64_t pages() const { return int64_t(page.size()); }
};

// Has fetched what is read of a granule's records, beside the work on the one before it. Of the planes behind words the keys': a token's bits
// are one to a line, so that a few tokens touch them all.
inline void expect_records(const WordHead& h, const Granule& granule, int64_t page_stride, WordUnit& u) {
    const Words& w = h.w;
    const int64_t planes = w.left.bits[KEYS] * w.tokens * w.dim / 8, codes[2] = {w.bits[KEYS] * h.groups() * w.tokens / 8, w.bits[VALUES] * h.groups() * w.tokens / 8};
    u.ahead.expect(w.pages * (w.kv_heads + 6), std::max(planes, std::max(codes[KEYS], codes[VALUES])));
    for (int64_t page = 0; page < w.pages; ++page) {
        if (!granule.page_valid[page]) continue;
        const uint8_t *first = granule.records + page * page_stride, *record = first + h.head * w.record_bytes;
        for (Side side : {KEYS, VALUES}) u.ahead.add(record + w.codes[side], codes[side]);
        for (int64_t head = 0; head * w.share < w.tokens; ++head) u.ahead.add(first + head * w.record_bytes + w.scale, 2 * w.share);
        if (!planes) continue;
        u.ahead.add(record + w.left_at + w.left.planes[KEYS], planes), u.ahead.add(record + w.left_at + w.left.scan[KEYS], 2 * w.tokens);
        for (Side side : {KEYS, VALUES}) u.ahead.add(record + w.left_at + w.left.centroid[side], 2 * w.dim);
    }
}

inline void read_places(const WordHead& h, Side side, WordUnit& u) {
    const Words& w = h.w;
    uint16_t* at = room(u.at, h.groups() * u.total);
    const auto read = w.bits[side] == 10 ? read_places<10> : read_places<0>;
    for (int64_t page = 0; page < u.pages(); ++page)
        read(u.page[page] + h.head * w.record_bytes + w.codes[side], h.groups(), w.bits[side], w.tokens, at + page * w.tokens, u.total);
}

// The tokens' scales, dealt out to the records of a page's heads.
inline void read_scales(const Words& w, WordUnit& u) {
    float* scale = room(u.scale, u.total);
    for (int64_t page = 0; page < u.pages(); ++page)
        for (int64_t first = 0, head = 0; first < w.tokens; first += w.share, ++head)
            halves_to_floats(u.page[page] + head * w.record_bytes + w.scale, std::min(w.share, w.tokens - first), scale + page * w.tokens + first);
}

// What the books stand for, times the factor that RoPE has on keys: queries by place in the groups, first and second channels of pairs apart.
inline void pair_queries(const WordHead& h, WordUnit& u) {
    const int64_t dim = h.w.dim, pairs = dim / 2;
    float* to = room(u.paired, h.rows * dim);
    for (int64_t side = 0; side < 2; ++side)
        for (int64_t r = 0; r < h.rows; ++r)
            for (int64_t pair = 0; pair < pairs; ++pair) *to++ = h.q[r * dim + h.channels(KEYS)[2 * pair + side]] * h.w.scaling;
}

// Queries turned back by the angle of each page.
inline void turn_queries(const WordHead& h, WordUnit& u) {
    const Words& w = h.w;
    const int64_t pairs = w.dim / 2;
    float *to = room(u.turned, u.pages() * h.rows * w.dim), *c = room(u.cosine, w.dim), *s = c + pairs;
    for (int64_t page = 0; page < u.pages(); ++page, to += h.rows * w.dim) {
        int32_t number;
        std::memcpy(&number, u.page[page] + h.head * w.record_bytes + w.page, 4);
        const float *cosine = w.page_cosine + number * w.half, *sine = w.page_sine + number * w.half;
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t x = h.channels(KEYS)[2 * pair];
            c[pair] = x < w.half ? cosine[x] : 1.0f, s[pair] = x < w.half ? sine[x] : 0.0f;
        }
        for (int64_t r = 0; r < h.rows; ++r) {
            const float *__restrict x = &u.paired[r * pairs], *__restrict y = x + h.rows * pairs;
            float *__restrict a = to + r * pairs, *__restrict b = a + h.rows * pairs;
            for (int64_t pair = 0; pair < pairs; ++pair) a[pair] = x[pair] * c[pair] + y[pair] * s[pair], b[pair] = y[pair] * c[pair] - x[pair] * s[pair];
        }
    }
}

// Has a book fetched, beside other work.
inline void expect_book(const WordHead& h, Side side, int64_t group, WordUnit& u) {
    const int64_t bytes = (WORD * int64_t(sizeof(int16_t))) << h.w.bits[side];
    if (group >= h.groups()) return;
    u.ahead.expect(1, bytes);
    u.ahead.add(h.book(side, group), bytes);
}

// Cosines and sines of the places in a page for a group's pairs, by sixteen places: to [P/16][4][2][16].
inline void copy_turns(const WordHead& h, int64_t group, float* to) {
    const Words& w = h.w;
    for (int64_t i = 0; i < 4; ++i) {
        const int64_t x = h.channels(KEYS)[WORD * group + 2 * i];
        const float* turns = w.places + std::min(x, w.half) * 2 * w.tokens;  // the last row is of channels that are not turned
        for (int64_t t = 0; t < w.tokens; t += 16)
            for (int64_t side = 0; side < 2; ++side) store16(to + 8 * t + 32 * i + 16 * side, load16(turns + side * w.tokens + t));
    }
}

// Adds a book's part of all tokens' products with some rows: raw [rows][total]. What a page or group needs is first put side by side: the
// loop has no registers for the addresses of all that it reads.
template <int ROWS, bool CENTRED>
inline void add_products(const WordHead& h, int64_t group, int64_t first, WordUnit& u) {
    const Words& w = h.w;
    const uint8_t* book = h.book(KEYS, group);
    const uint16_t* at = u.at.data() + group * u.total;
    const int64_t pairs = w.dim / 2;
    const size_t lines = u.first ? 12 : 2;
    float q[8][ROWS], factor[8], center[8];
    std::copy_n(h.factor(KEYS) + WORD * group, WORD, factor);
    if (CENTRED) std::copy_n(h.center(KEYS) + WORD * group, WORD, center);
    float* raw = &u.raw[first * u.total];
    for (int64_t page = 0; page < u.pages(); ++page) {
        const float* turned = &u.turned[page * h.rows * w.dim + first * pairs + 4 * group];
        for (int i = 0; i < 8; ++i)
            for (int r = 0; r < ROWS; ++r) q[i][r] = turned[(i % 2 * h.rows + r) * pairs + i / 2];
        const float* turns = u.turns.data();
        for (int64_t t = 0; t < w.tokens; t += 16, turns += 128, at += 16, raw += 16) {
            SixteenInts pair[4];
            load_words(book, at, pair);
            u.ahead.step(lines);
            Sixteen sum[ROWS];
            UNROLLED for (int r = 0; r < ROWS; ++r) sum[r] = group ? load16(raw + r * u.total) : Sixteen{};
            UNROLLED for (int i = 0; i < 4; ++i) {
                Sixteen x = low_half(pair[i]) * all_lanes(factor[2 * i]), y = high_half(pair[i]) * all_lanes(factor[2 * i + 1]);
                if (CENTRED) x += all_lanes(center[2 * i]), y += all_lanes(center[2 * i + 1]);
                const Sixteen c = load16(turns + 32 * i), s = load16(turns + 32 * i + 16);
                const Sixteen turned_x = fused(-y, s, x * c), turned_y = fused(y, c, x * s);
                UNROLLED for (int r = 0; r < ROWS; ++r) sum[r] = fused(turned_x, all_lanes(q[2 * i][r]), sum[r]);
                UNROLLED for (int r = 0; r < ROWS; ++r) sum[r] = fused(turned_y, all_lanes(q[2 * i + 1][r]), sum[r]);
            }
            UNROLLED for (int r = 0; r < ROWS; ++r) store16(raw + r * u.total, sum[r]);
        }
    }
}

// Products of queries and keys (raw) and scores; with a correction these also have the query's share of it times the square of the scale.
inline void score_words(const WordHead& h, WordUnit& u) {
    const Words& w = h.w;
    read_places(h, KEYS, u), read_scales(w, u), turn_queries(h, u);
    float *raw = room(u.raw, h.rows * u.total), *scores = room(u.scores, h.rows * u.total);
    for (int64_t group = 0; group < h.groups(); ++group) {
        if (u.first) expect_book(h, group + 1 < h.groups() ? KEYS : VALUES, (group + 1) % h.groups(), u);
        copy_turns(h, group, room(u.turns, 8 * w.tokens));
        for (int64_t first = 0; first < h.rows; first += FEW)
            with_rows(h.rows - first, [&](auto rows) {
                if (h.center(KEYS)) add_products<rows, true>(h, group, first, u);
                else add_products<rows, false>(h, group, first, u);
            });
    }
    for (int64_t r = 0; r < h.rows; ++r, raw += u.total, scores += u.total) {
        float variance = 0.0f;
        if (w.correction)
            for (int64_t d = 0; d < w.dim; ++d) variance += h.q[r * w.dim + d] * h.q[r * w.dim + d] * w.correction[h.head * w.dim + d];
        for (int64_t t = 0; t < u.total; t += 16) {
            const Sixteen scale = load16(&u.scale[t]), product = load16(raw + t) * scale;
            store16(raw + t, product), store16(scores + t, product + scale * scale * variance);
        }
    }
}

// m [rows], p and its sums: of pages and of all, l [rows].
inline void soften_words(const WordHead& h, WordUnit& u, float* m, float* l) {
    const int64_t tokens = h.w.tokens;
    float *p = room(u.p, h.rows * u.total), *mass = room(u.mass, h.rows * u.pages());
    for (int64_t r = 0; r < h.rows; ++r) {
        const float* scores = &u.scores[r * u.total];
        Sixteen most = load16(scores);  // NaN of a query that is NaN stays
        for (int64_t t = 16; t < u.total; t += 16) most = larger(load16(scores + t), most);
        m[r] = most16(most), l[r] = 0.0f;
        for (int64_t page = 0; page < u.pages(); ++page) {
            const float sum = exp2_shifted(scores + page * tokens, m[r], tokens, p + r * u.total + page * tokens);
            mass[r * u.pages() + page] = sum, l[r] += sum;
        }
    }
}

#ifdef __AVX512F__
constexpr int ABREAST = 4;  // tokens whose products are added to sums of their own: one sum would wait for its own results
#else
constexpr int ABREAST = 1;  // fewer registers
#endif

// sums [rows][16] of two books' words by p.
template <int ROWS>
inline void add_values(const WordHead& h, int64_t group, int64_t first, WordUnit& u) {
    const bool alone = group + 1 == h.groups();
    const uint8_t *book[2] = {h.book(VALUES, group), h.book(VALUES, group + !alone)};
    const uint16_t *at = u.at.data() + group * u.total, *beside = at + (alone ? 0 : u.total);
    const float* p = &u.p[first * u.total];
    const size_t lines = u.first ? 4 : 1;
    Sixteen sum[ROWS][ABREAST] = {};
    for (int64_t t = 0; t < u.total; t += ABREAST) {
        u.ahead.step(lines);
        UNROLLED for (int i = 0; i < ABREAST; ++i) {
            const Sixteen words = two_words(book[0] + at[t + i], book[1] + beside[t + i]);
            UNROLLED for (int r = 0; r < ROWS; ++r) sum[r][i] = fused(words, all_lanes(p[r * u.total + t + i]), sum[r][i]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int half = ABREAST / 2; half; half /= 2)
            for (int i = 0; i < half; ++i) sum[r][i] += sum[r][i + half];
        store16(&u.sums[(first + r) * (h.w.dim + WORD) + WORD * group], sum[r][0]);
    }
}

// o [rows][D] of values by p, with their sums l.
inline void sum_words(const WordHead& h, WordUnit& u, const float* l, float* o) {
    const int64_t dim = h.w.dim, stride = dim + WORD;
    read_places(h, VALUES, u);
    room(u.sums, h.rows * stride);
    if (u.first) expect_book(h, VALUES, 1, u);
    for (int64_t group = 0; group < h.groups(); group += 2) {
        if (u.first) expect_book(h, VALUES, group + 2, u), expect_book(h, VALUES, group + 3, u);
        for (int64_t first = 0; first < h.rows; first += FEW) with_rows(h.rows - first, [&](auto rows) { add_values<rows>(h, group, first, u); });
    }
    const float *factor = h.factor(VALUES), *center = h.center(VALUES);
    for (int64_t r = 0; r < h.rows; ++r)
        for (int64_t d = 0; d < dim; ++d) o[r * dim + h.channels(VALUES)[d]] = u.sums[r * stride + d] * factor[d] + (center ? center[d] * l[r] : 0.0f);
}

inline void tell_page_mass(const Words& w, const WordUnit& u, int64_t rows, const uint8_t* page_valid, float* to) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t page = 0, held = 0; page < w.pages; ++page) to[r * w.pages + page] = page_valid[page] ? u.mass[r * u.pages() + held++] : 0.0f;
}

}  // namespace
