// Twin of the attention of bitkv_dist/codec/tailored.py: keys and values rebuilt from looked-up words, keys turned by RoPE.
// One unit is one granule, one KV head, its group's query rows. A query is turned back by the angle of each page, once, and a key by that of
// its place in the page; a book is gone through with all tokens of a granule while it lies in the nearest cache. Sums of floats have one
// fixed order, so nothing depends on threads or on other granules.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

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
    Room<uint16_t> at;  // [groups][total]
    Room<float> turned;  // [pages][D/2][2][rows]
    Room<float> scale, raw, scores, p, mass;  // [total]; [rows][total] three times; [rows][pages]
    Room<float> sums;  // [rows][D], by place in the groups

    void start(const Words& w, const Granule& granule, int64_t page_stride) {
        page.clear();
        for (int64_t i = 0; i < w.pages; ++i)
            if (granule.page_valid[i]) page.push_back(granule.records + i * page_stride);
        total = pages() * w.tokens;
    }

    int64_t pages() const { return int64_t(page.size()); }
};

inline void read_places(const WordHead& h, Side side, WordUnit& u) {
    const Words& w = h.w;
    uint16_t* at = room(u.at, h.groups() * u.total);
    for (int64_t page = 0; page < u.pages(); ++page)
        read_places(u.page[page] + h.head * w.record_bytes + w.codes[side], h.groups(), w.bits[side], w.tokens, at + page * w.tokens, u.total);
}

// The tokens' scales, dealt out to the records of a page's heads.
inline void read_scales(const Words& w, WordUnit& u) {
    float* scale = room(u.scale, u.total);
    for (int64_t page = 0; page < u.pages(); ++page)
        for (int64_t first = 0, head = 0; first < w.tokens; first += w.share, ++head)
            halves_to_floats(u.page[page] + head * w.record_bytes + w.scale, std::min(w.share, w.tokens - first), scale + page * w.tokens + first);
}

// Queries, times the factor that RoPE has on keys, turned back by the angle of each page.
inline void turn_queries(const WordHead& h, WordUnit& u) {
    const Words& w = h.w;
    const int32_t* channels = h.channels(KEYS);
    float* to = room(u.turned, u.pages() * h.rows * w.dim);
    for (int64_t page = 0; page < u.pages(); ++page) {
        int32_t number;
        std::memcpy(&number, u.page[page] + h.head * w.record_bytes + w.page, 4);
        const float *cosine = w.page_cosine + number * w.half, *sine = w.page_sine + number * w.half;
        for (int64_t pair = 0; pair < w.dim / 2; ++pair, to += 2 * h.rows) {
            const int64_t x = channels[2 * pair], y = channels[2 * pair + 1];
            const float c = x < w.half ? cosine[x] : 1.0f, s = x < w.half ? sine[x] : 0.0f;
            for (int64_t r = 0; r < h.rows; ++r) {
                const float a = h.q[r * w.dim + x] * w.scaling, b = h.q[r * w.dim + y] * w.scaling;
                to[r] = a * c + b * s, to[h.rows + r] = b * c - a * s;
            }
        }
    }
}

// Adds a book's part of all tokens' products with some rows: raw [rows][total].
template <int ROWS, bool CENTRED>
inline void add_products(const WordHead& h, int64_t group, int64_t first, WordUnit& u) {
    const Words& w = h.w;
    const uint8_t* book = h.book(KEYS, group);
    const uint16_t* at = u.at.data() + group * u.total;
    const float *factor = h.factor(KEYS) + WORD * group, *center = CENTRED ? h.center(KEYS) + WORD * group : nullptr;
    const float *cosine[4], *sine[4];
    for (int i = 0; i < 4; ++i) {
        const int64_t x = h.channels(KEYS)[WORD * group + 2 * i];
        cosine[i] = w.places + (x < w.half ? x : w.half) * 2 * w.tokens, sine[i] = cosine[i] + w.tokens;
    }
    for (int64_t page = 0; page < u.pages(); ++page) {
        const float* q = &u.turned[(page * w.dim / 2 + 4 * group) * 2 * h.rows] + first;
        for (int64_t t = 0; t < w.tokens; t += 16) {
            const int64_t token = page * w.tokens + t;
            SixteenInts pair[4];
            load_words(book, at + token, pair);
            Sixteen sum[ROWS];
            UNROLLED for (int r = 0; r < ROWS; ++r) sum[r] = group ? load16(&u.raw[(first + r) * u.total + token]) : Sixteen{};
            UNROLLED for (int i = 0; i < 4; ++i) {
                Sixteen x = low_half(pair[i]) * all_lanes(factor[2 * i]), y = high_half(pair[i]) * all_lanes(factor[2 * i + 1]);
                if (CENTRED) x += all_lanes(center[2 * i]), y += all_lanes(center[2 * i + 1]);
                const Sixteen c = load16(cosine[i] + t), s = load16(sine[i] + t), zero = {};
                const Sixteen turned_x = fused(zero - y, s, x * c), turned_y = fused(y, c, x * s);
                UNROLLED for (int r = 0; r < ROWS; ++r) sum[r] = fused(turned_x, all_lanes(q[2 * i * h.rows + r]), sum[r]);
                UNROLLED for (int r = 0; r < ROWS; ++r) sum[r] = fused(turned_y, all_lanes(q[(2 * i + 1) * h.rows + r]), sum[r]);
            }
            UNROLLED for (int r = 0; r < ROWS; ++r) store16(&u.raw[(first + r) * u.total + token], sum[r]);
        }
    }
}

// Products of queries and keys (raw) and scores; with a correction these also have the query's share of it times the square of the scale.
inline void score_words(const WordHead& h, WordUnit& u) {
    const Words& w = h.w;
    read_places(h, KEYS, u), read_scales(w, u), turn_queries(h, u);
    float *raw = room(u.raw, h.rows * u.total), *scores = room(u.scores, h.rows * u.total);
    for (int64_t group = 0; group < h.groups(); ++group)
        for (int64_t first = 0; first < h.rows; first += FEW)
            with_rows(h.rows - first, [&](auto rows) {
                if (h.center(KEYS)) add_products<rows, true>(h, group, first, u);
                else add_products<rows, false>(h, group, first, u);
            });
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
    Sixteen sum[ROWS][ABREAST] = {};
    for (int64_t t = 0; t < u.total; t += ABREAST)
        UNROLLED for (int i = 0; i < ABREAST; ++i) {
            const Sixteen words = two_words(book[0] + at[t + i], book[1] + beside[t + i]);
            UNROLLED for (int r = 0; r < ROWS; ++r) sum[r][i] = fused(words, all_lanes(p[r * u.total + t + i]), sum[r][i]);
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
    for (int64_t group = 0; group < h.groups(); group += 2)
        for (int64_t first = 0; first < h.rows; first += FEW) with_rows(h.rows - first, [&](auto rows) { add_values<rows>(h, group, first, u); });
    const float *factor = h.factor(VALUES), *center = h.center(VALUES);
    for (int64_t r = 0; r < h.rows; ++r)
        for (int64_t d = 0; d < dim; ++d) o[r * dim + h.channels(VALUES)[d]] = u.sums[r * stride + d] * factor[d] + (center ? center[d] * l[r] : 0.0f);
}

inline void tell_page_mass(const Words& w, const WordUnit& u, int64_t rows, const uint8_t* page_valid, float* to) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t page = 0, held = 0; page < w.pages; ++page) to[r * w.pages + page] = page_valid[page] ? u.mass[r * u.pages() + held++] : 0.0f;
}

}  // namespace
