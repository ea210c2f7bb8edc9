// Digests of what the portable kernels compute from numbers of a generator: the same on every processor, since all sums have one order and no product is
// contracted with a sum.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "interface.hpp"

using namespace bitkv;

namespace {

uint32_t state = 1;
uint32_t next() { return state = state * 1664525u + 1013904223u, state >> 8; }
float uniform() { return float(next()) / 8388608.0f - 1.0f; }  // -1 .. 1

struct Digest {
    uint64_t value = 14695981039346656037u;
    void add(const void* data, size_t bytes) {
        for (size_t i = 0; i < bytes; ++i) value = (value ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
    }
};

void level_dots(const Kernels& run) {
    for (int64_t width : {2, 8, 10, 16})
        for (int64_t planes : {1, 3})
            for (int64_t rows : {1, 3, 6}) {
                const int64_t height = 20;
                std::vector<uint8_t> words(4 * planes * height * width);
                std::vector<int8_t> operands(rows * 4 * height);
                for (uint8_t& x : words) x = uint8_t(next());
                for (int8_t& x : operands) x = int8_t(int(next() % 255) - 127);
                std::vector<int32_t> out(rows * 8 * width);
                run.level_dot(words.data(), planes, height, width, operands.data(), 4 * height, rows, out.data(), 8 * width);
                Digest digest;
                digest.add(out.data(), out.size() * sizeof(int32_t));
                std::printf("level_dot %d %d %d %016" PRIx64 "\n", int(width), int(planes), int(rows), digest.value);
            }
}

// Records are encoded, then attended to by three query heads each of two KV heads.
void attend(const Kernels& run, int64_t dim, int64_t tokens, int64_t bits, int64_t scan_bits) {
    constexpr int64_t heads = 2, group = 3, granules = 2;
    Layout l = {tokens, dim, heads, 512 / tokens, 0, {bits, bits}, {scan_bits, scan_bits}, {}, {}, {}, {}, {}};
    auto place = [&](int64_t (&at)[2], int64_t bytes) {
        for (Side side : {KEYS, VALUES}) at[side] = l.record_bytes, l.record_bytes += bytes;
    };
    place(l.planes, scan_bits * tokens * dim / 8), place(l.scan, 2 * tokens);
    if (bits > scan_bits) place(l.full, 2 * tokens), place(l.low, (bits - scan_bits) * tokens * dim / 8);
    place(l.centroid, 2 * dim);
    std::vector<float> signs(heads * dim), x(tokens * dim), q(heads * group * dim);
    for (float& s : signs) s = next() & 1 ? 1.0f : -1.0f;
    std::vector<uint8_t> records(granules * l.pages * heads * l.record_bytes), valid(granules * l.pages, 1);
    valid[1] = 0;
    for (int64_t record = 0; record < granules * l.pages * heads; ++record)
        for (Side side : {KEYS, VALUES}) {
            for (float& number : x) number = uniform() + uniform() + 0.2f;
            run.encode(l, side, x.data(), &signs[record % heads * dim], side == KEYS, &records[record * l.record_bytes]);
        }
    std::vector<int8_t> codes(q.size());
    std::vector<float> scale(heads * group), norm2(heads * group), rotated(q.size());
    for (float& number : q) number = uniform();
    for (int64_t row = 0; row < heads * group; ++row)
        run.quantize_query(dim, &q[row * dim], &signs[row / group * dim], &codes[row * dim], &scale[row], &norm2[row], &rotated[row * dim]);
    std::vector<Granule> views;
    for (int64_t g = 0; g < granules; ++g) views.push_back({&records[g * l.pages * heads * l.record_bytes], &valid[g * l.pages]});
    const Refinement refine = {bits > scan_bits, 1, 4, 0.05, 0.01f, 0.001f};
    const int64_t rows = granules * heads * group;
    std::vector<float> m(rows), sum(rows), o(rows * dim);
    const int64_t refined = run.attend(l, {1, group, codes.data(), scale.data(), norm2.data(), rotated.data()}, 0, heads, views.data(), granules, heads * l.record_bytes, refine, {m.data(), sum.data(), o.data()});
    Digest stored, found;
    stored.add(records.data(), records.size());
    found.add(m.data(), rows * sizeof(float)), found.add(sum.data(), rows * sizeof(float)), found.add(o.data(), o.size() * sizeof(float));
    std::printf("attend %d %d %d %d refined %d records %016" PRIx64 " partials %016" PRIx64 "\n", int(dim), int(tokens), int(bits), int(scan_bits), int(refined), stored.value, found.value);
}

}  // namespace

int main() {
    const Kernels& run = portable_kernels();
    level_dots(run);
    for (int64_t dim : {64, 80, 128})
        for (int64_t tokens : {64, 128}) attend(run, dim, tokens, 1, 1), attend(run, dim, tokens, 4, 1), attend(run, dim, tokens, 3, 3);
}
