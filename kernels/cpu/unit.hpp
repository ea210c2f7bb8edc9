// One unit of attention: one granule, one KV head, one query of its group's rows. Its work is cut in two, so that what refinement reads
// is on its way while the next unit's scan runs: `begin` (scores.hpp) scans and selects, `finish` (values.hpp) refines and sums values.
#pragma once
#include <cstdint>
#include <vector>

#include "interface.hpp"
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
    std::vector<const uint8_t*> words, bits;
    std::vector<float> product, sizes, scales, ranks, weights, mass, row_scale;
    std::vector<int32_t> levels, dots, keys, offset;
    std::vector<int8_t> integers;
    std::vector<uint8_t> codes;
    std::vector<List> lists;
    std::vector<int64_t> end;
};

// Tokens count from the first valid page; the scales are those of the scanned planes.
struct Unit {
    int64_t first, rows, total;  // rows first .. first + rows - 1 of the queries; tokens
    std::vector<const uint8_t*> record;  // of the valid pages
    std::vector<float> scale[2], centroid[2];  // [pages][P], [pages][D]
    std::vector<float> scores, p, peak;  // [rows][total]; p = 2^(score - peak) if `shifted`
    std::vector<float> base;  // [rows][pages]: q.c
    bool shifted;
    std::vector<int32_t> selected, levels;  // positions of all lists; levels [rows][count] of their scanned keys
    std::vector<List> lists;

    int64_t pages() const { return int64_t(record.size()); }

    void load(const Layout& l, Side side) {
        float* to = room(scale[side], pages() * l.tokens);
        float* mean = room(centroid[side], pages() * l.dim);
        for (const uint8_t* page : record) {
            halves_to_floats(page + l.scan[side], l.tokens, to), halves_to_floats(page + l.centroid[side], l.dim, mean);
            to += l.tokens, mean += l.dim;
        }
    }

    // Where the low bits and the full scale of a token lie.
    const uint8_t* low_bits(const Layout& l, Side side, int64_t token) const {
        return record[token / l.tokens] + l.low[side] + token % l.tokens * ((l.bits[side] - l.scan_bits[side]) * l.dim / 8);
    }
    const uint8_t* full_scale(const Layout& l, Side side, int64_t token) const { return record[token / l.tokens] + l.full[side] + 2 * (token % l.tokens); }
};

}  // namespace
