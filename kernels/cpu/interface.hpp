// What the instruction-set builds of the CPU kernels offer and what they are told. Plain C++, no torch headers.
#pragma once
#include <cstdint>

namespace bitkv {

// Of the functions in extern "C" and the structs that they take; the same number as in __init__.py. Whoever changes one of them
// raises it, so that a library which was built before is refused and not called with arguments that it does not know.
constexpr int64_t INTERFACE = 4;

enum Side { KEYS = 0, VALUES = 1 };

// The page record of bitkv_dist/codec/planes.py: byte offsets of its fields; `full` and `low` are unused when scan == bits.
struct Layout {
    int64_t tokens, dim, kv_heads, pages, record_bytes;
    int64_t bits[2], scan_bits[2];
    int64_t planes[2], scan[2], full[2], low[2], centroid[2];
};

// Rotated queries of one layer, base 2: codes int8 [HK, Q, G, D], the rest fp32 [HK, Q, G] and [HK, Q, G, D].
struct Queries {
    int64_t count, group;
    const int8_t* codes;
    const float *scale, *norm2, *rotated;
};

struct Refinement {
    int64_t enabled, group, min_tokens;
    double share;
    float scan_noise, full_noise;  // 0.5 ln2 r^2 / (D a^2) of the scanned and of the full key code
};

// The page record of bitkv_dist/codec/tailored.py, and the books of one layer: of words of eight channels, given side by side as they stand in
// the groups. A channel is word * factor + center; center is null where all of it is 0. Behind the words there may be planes (worded.py).
struct Words {
    int64_t tokens, dim, kv_heads, pages, record_bytes;
    int64_t half, page, scale, share, left_at;  // channels turned by RoPE / 2; byte offsets: page number, scales; scales in a record; planes
    int64_t bits[2], codes[2];  // of an index; byte offsets
    const int16_t* words[2];  // [HK][D/8][2^bits][8]
    const float *factor[2], *center[2];  // [HK][D], in the order of the groups
    const int32_t* channels[2];  // [HK][D]: which channel that is; of keys always a pair that RoPE turns, or two that it leaves alone
    const float* places;  // [half + 1][2][P]: cosine and sine of the places in a page, 1 and 0 in the last row
    const float *page_cosine, *page_sine;  // [page number][half], of a page's first token
    const float* correction;  // [HK][D], what a query's square counts by, or null
    const float* signs[2];  // [HK][D] of the planes
    Layout left;  // the record of the planes
    float scaling;  // what RoPE multiplies keys by
};

// One granule: records [pages][HK], of which page_valid [pages] says which are sealed.
struct Granule {
    const uint8_t *records, *page_valid;
};

// Partials m, l [..., Q, G]; o [..., Q, G, D]; page_mass [..., Q, G, pages], unless it is null: what each page has of l.
struct PartialOut {
    float *m, *l, *o, *page_mass = nullptr;
};

// A weight matrix [out, in] as torch holds it, float32 or bfloat16, contiguous; bias fp32 [out] or null.
struct Matrix {
    int64_t out, in, bfloat16;
    const void* data;
    const float* bias;
};

struct Kernels {
    const char* name;
    // out int32 [rows][8 W]: out[r][j W + i] = sum over k, b of operands[r][4 k + b] times the level that bits 8 b + j of words[plane][k][i]
    // stand for; k < height. Strides between rows in bytes (operands) and elements (out). Nothing but `out` needs to be aligned.
    void (*level_dot)(const uint8_t* words, int64_t planes, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, int32_t* out, int64_t out_stride);
    // scores [rows][total] -> ascending positions of `count` tokens each: one list if group, else `rows` of them.
    void (*select)(int64_t rows, int64_t total, const float* scores, bool group, int64_t count, int32_t* positions);
    void (*encode)(const Layout&, Side, const float* x, const float* signs, int64_t unbiased, uint8_t* record);
    void (*quantize_query)(int64_t dim, const float* q, const float* signs, int8_t* codes, float* scale, float* norm2, float* rotated);
    // Partials [count][heads] of some KV heads and granules, whose pages are page_stride bytes apart. Returns the tokens refined.
    int64_t (*attend)(const Layout&, const Queries&, int64_t head, int64_t heads, const Granule* granules, int64_t count, int64_t page_stride, const Refinement&, PartialOut);
    // Of one KV head, whose queries q are fp32 [rows][D] in base 2; partials [count][rows]. Returns the tokens refined.
    int64_t (*attend_words)(const Words&, int64_t rows, const float* q, int64_t head, const Granule* granules, int64_t count, int64_t page_stride, const Refinement&, PartialOut);
    void (*merge)(int64_t rows, int64_t dim, float* m, float* l, float* o, const float* m2, const float* l2, const float* o2);  // into the first
    void (*rotate_back)(int64_t dim, float* z, const float* signs);
    // Partial of one query row over exact rows k, v fp32 [count, D], row_stride floats apart.
    void (*attend_exact)(int64_t dim, int64_t count, int64_t row_stride, const float* q, const float* k, const float* v, float* m, float* l, float* o);
    // y[r][o] = sum over i of weight[o][i] x[r][i], plus bias, for outputs first <= o < last of y [rows, out]; x [rows, in].
    void (*linear)(const Matrix&, int64_t first, int64_t last, const float* x, int64_t rows, float* y);
    // Between bfloat16 and float32.
    void (*widen)(int64_t n, const uint16_t* x, float* y);
    void (*narrow)(int64_t n, const float* x, uint16_t* y);
    void (*rms_norm)(int64_t n, float eps, const float* x, const float* weight, float* y);
    void (*rotary)(int64_t n, const float* cosine, const float* sine, float* x);
    void (*gated)(int64_t n, float* gate, const float* up);
    // Some rows of one KV head's prompt queries (prompt.hpp); null: this instruction set leaves prompts to torch.
    void (*attend_prompt)(int64_t dim, int64_t n, int64_t total, float scale, const float* q, const float* k, const float* v, int64_t first, int64_t last, float* out);
    // The same in bfloat16 (prompt_bfloat16.hpp), for even D and a scale above 0; null: widened, by the one above.
    void (*attend_prompt_bfloat16)(int64_t dim, int64_t n, int64_t total, float scale, const uint16_t* q, const uint16_t* k, const uint16_t* v, int64_t first, int64_t last, uint16_t* out) = nullptr;
};

const Kernels& kernels();  // those of the chosen instruction set

const Kernels& portable_kernels();
#ifdef BITKV_X86
const Kernels& avx2_kernels();
const Kernels& avxvnni_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512bf16_kernels();  // those of avx512, and prompts in bfloat16
#endif

}  // namespace bitkv
