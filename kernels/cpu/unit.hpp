// One unit of attention: one granule, one KV head, one query of its group's rows. With refinement `begin` (scores.hpp) scans and selects,
// `finish` (values.hpp) sums values and refines.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "interface.hpp"
#include "level_dot.hpp"
#include "numbers.hpp"
#include "room.hpp"
#include "weigh.hpp"

namespace {

using namespace bitkv;

inline float level_unit(int64_t bits) { return bits == 1 ? 1.0f : 0.5f; }

// Tokens to refine: a list for `rows` rows from `row` on, ascending.
struct List {
    int64_t row, rows, count;
    const int32_t* tokens;

    int64_t whole() const { return (count + 15) / 16 * 16; }  // in registers
};

// What the scores of a few rows and one page are made of.
struct Factors {
    Each scale, noise, base;
};

// Room for what lasts no longer than a step of the work.
struct Workspace {
    Operands weights;
    Room<float> product, log_sum_exp, refined, weight, factor;
    Room<Each> most;
    Room<Factors> factors;
    Room<int32_t> dots, keys, some;
    Room<int8_t> integers;
    Room<uint8_t> codes;
    Room<uint16_t> halves;
};

// Tokens count from the first valid page.
struct Unit {
    int64_t first, rows, total;  // rows first .. first + rows - 1 of the queries; tokens
    int page_log2;  // of the tokens of a page
    std::vector<const uint8_t*> record;  // of the valid pages
    Room<float> scores, p;  // [rows][total], p = 2^(score - shift), or weights, p by the scales of values
    Room<float> base;  // [rows][pages]: q.c
    Room<float> lanes, peak, shift;  // [rows][16], [rows]: the largest score; the whole number from which p counts
    Room<Each> mass, size;  // [rows / FEW][pages]: the sum of p, by which the centroid counts; by what level sums count
    Room<int32_t> sums;  // [pages][rows][D], level sums of the scanned values
    Room<int32_t> levels, selected;  // of scanned keys [rows][total], or [rows][P] of a page at a time; positions of all lists
    Room<uint16_t> taken;  // [lists][total / 16]: a bit for each token of a list
    std::vector<List> lists;

    int64_t pages() const { return int64_t(record.size()); }
    int64_t block(int64_t row, int64_t page) const { return row / FEW * pages() + page; }

    // `records`: the first page's, of one head.
    void start(const Layout& l, const uint8_t* records, const uint8_t* page_valid, int64_t page_stride, int64_t first_row, int64_t group) {
        record.clear(), lists.clear();
        for (int64_t page = 0; page < l.pages; ++page)
            if (page_valid[page]) record.push_back(records + page * page_stride);
        first = first_row, rows = group, total = pages() * l.tokens, page_log2 = l.tokens == 64 ? 6 : 7;
        const int64_t all = rows * pages(), blocks = (rows + FEW - 1) / FEW * pages();
        room(base, all + 16), room(lanes, 16 * (rows + FEW)), room(peak, rows + 16), room(shift, rows + 16), room(mass, blocks), room(size, blocks), room(sums, all * l.dim);
    }

    int64_t page_of(int64_t token) const { return token >> page_log2; }
    int64_t within_page(int64_t token) const { return token & ((int64_t(1) << page_log2) - 1); }

    // The scales of the scanned planes and the centroid of a page, in halves.
    const uint8_t* scales(const Layout& l, Side side, int64_t page) const { return record[page] + l.scan[side]; }
    const uint8_t* centroid(const Layout& l, Side side, int64_t page) const { return record[page] + l.centroid[side]; }

    // Where the low bits and the full scale of a token lie.
    const uint8_t* low_bits(const Layout& l, Side side, int64_t token) const {
        return record[page_of(token)] + l.low[side] + within_page(token) * ((l.bits[side] - l.scan_bits[side]) * l.dim / 8);
    }
    const uint8_t* full_scale(const Layout& l, Side side, int64_t token) const { return record[page_of(token)] + l.full[side] + 2 * within_page(token); }
};

}  // namespace
