// One unit of attention: one granule, one KV head, one query of its group's rows. Pages in one pass each where nothing is refined
// (attend.hpp); with refinement the work is cut in two, so that what refinement reads is on its way while the next unit's scan runs:
// `begin` (scores.hpp) scans and selects, `finish` (values.hpp) refines and sums values.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "interface.hpp"
#include "level_dot.hpp"
#include "numbers.hpp"
#include "room.hpp"

namespace {

using namespace bitkv;

inline float level_unit(int64_t bits) { return bits == 1 ? 1.0f : 0.5f; }

// Tokens to refine: a list for `rows` rows from `row` on, ascending.
struct List {
    int64_t row, rows, count;
    const int32_t* tokens;
};

// Room for what lasts no longer than a step of the work.
struct Workspace {
    Operands weights;
    std::vector<float> product, log_sum_exp, refined, weight, refined_size, squares, halves, full;
    std::vector<int32_t> dots, keys, some, code_sums;
    std::vector<int8_t> integers;
    std::vector<uint8_t> codes;
};

// Tokens count from the first valid page; the scales are those of the scanned planes.
struct Unit {
    int64_t first, rows, total;  // rows first .. first + rows - 1 of the queries; tokens
    std::vector<const uint8_t*> record;  // of the valid pages
    std::vector<float> scale[2], centroid[2];  // [pages][P], [pages][D]
    std::vector<float> scores, p;  // [rows][total], p = 2^(score - shift of its page)
    std::vector<float> base, shift;  // [rows][pages]: q.c; the largest score
    std::vector<float> mass, size;  // [rows][pages]: the sum of p, by which the centroid counts; by what level sums count
    std::vector<int32_t> sums;  // [pages][rows][D], level sums of the scanned values
    std::vector<int32_t> levels, selected, kept;  // of scanned keys [rows][total]; positions of all lists; levels [rows][count] of those
    std::vector<List> lists;

    int64_t pages() const { return int64_t(record.size()); }

    // `records`: the first page's, of one head.
    void start(const Layout& l, const uint8_t* records, const uint8_t* page_valid, int64_t page_stride, int64_t first_row, int64_t group) {
        record.clear(), lists.clear();
        for (int64_t page = 0; page < l.pages; ++page)
            if (page_valid[page]) record.push_back(records + page * page_stride);
        first = first_row, rows = group, total = pages() * l.tokens;
        const int64_t all = rows * pages(), whole = (all + 15) / 16 * 16;
        room(base, all), room(shift, whole), room(mass, whole), room(size, whole), room(sums, all * l.dim);
        for (Side side : {KEYS, VALUES}) room(scale[side], total), room(centroid[side], pages() * l.dim);
    }

    // The scales and the centroid of a page.
    void load(const Layout& l, Side side, int64_t page) {
        halves_to_floats(record[page] + l.scan[side], l.tokens, &scale[side][page * l.tokens]);
        halves_to_floats(record[page] + l.centroid[side], l.dim, &centroid[side][page * l.dim]);
    }

    // Where the low bits and the full scale of a token lie.
    const uint8_t* low_bits(const Layout& l, Side side, int64_t token) const {
        return record[token / l.tokens] + l.low[side] + token % l.tokens * ((l.bits[side] - l.scan_bits[side]) * l.dim / 8);
    }
    const uint8_t* full_scale(const Layout& l, Side side, int64_t token) const { return record[token / l.tokens] + l.full[side] + 2 * (token % l.tokens); }
};

}  // namespace
