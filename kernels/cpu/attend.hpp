// Twin of `attend` in kernels/reference.py for one granule and KV head: scan, select, refine, softmax, values.
// The integers are the reference's; sums of floats have one fixed order, so nothing depends on threads or on other granules.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "interface.hpp"
#include "numbers.hpp"
#include "plane_dot.hpp"
#include "rotate.hpp"

namespace {

using namespace bitkv;

inline float level_unit(int64_t bits) { return bits == 1 ? 1.0f : 0.5f; }

inline void quantize_query(int64_t dim, const float* q, const float* signs, int8_t* codes, float* scale, float* norm2, float* rotated) {
    std::memcpy(rotated, q, dim * sizeof(float));
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

// Order-preserving map of floats to integers.
inline int32_t ordered(float x) {
    const int32_t i = bits_of(x);
    return i ^ ((i >> 31) & 0x7fffffff);
}

// Positions of the `count` largest of n keys, ascending; ties go to the lower position. No sort: bisection on the value.
inline void largest(const int32_t* keys, int64_t n, int64_t count, std::vector<int32_t>& out) {
    out.clear();
    if (count <= 0) return;
    int32_t least = keys[0], most = keys[0];
    for (int64_t t = 1; t < n; ++t) least = keys[t] < least ? keys[t] : least, most = keys[t] > most ? keys[t] : most;
    int64_t low = least, high = most;
    while (low < high) {  // the largest threshold that at least `count` keys reach
        const int64_t middle = low + (high - low + 1) / 2;
        const int32_t threshold = int32_t(middle);
        int32_t reached = 0;
        for (int64_t t = 0; t < n; ++t) reached += keys[t] >= threshold;
        if (reached >= count) low = middle; else high = middle - 1;
        if (reached == count) break;
    }
    int32_t above = 0;
    for (int64_t t = 0; t < n; ++t) above += keys[t] > low;
    int64_t ties = count - above;
    for (int64_t t = 0; t < n; ++t) {
        if (keys[t] > low) out.push_back(int32_t(t));
        else if (keys[t] == low && ties > 0) out.push_back(int32_t(t)), --ties;
    }
}

// What one granule and head keeps between queries, and room for the scores of a group.
struct Work {
    std::vector<int64_t> page;  // valid pages
    std::vector<float> key_scale[2], value_scale[2], key_centroid, value_centroid;  // [0] scanned, [1] full
    std::vector<int32_t> dots, top, weights, refined_weights, selected, keys;
    std::vector<float> scores, p, rank, fold, out;
};

inline void load_halves(const uint8_t* from, int64_t n, std::vector<float>& to) {
    to.resize(to.size() + n);
    halves_to_floats(reinterpret_cast<const uint16_t*>(from), n, to.data() + to.size() - n);
}

inline void load_page_metadata(const Layout& l, const Granule& granule, Work& w) {
    w.page.clear();
    for (int side = 0; side < 2; ++side) {
        auto& scales = side == KEYS ? w.key_scale : w.value_scale;
        auto& centroid = side == KEYS ? w.key_centroid : w.value_centroid;
        scales[0].clear(), scales[1].clear(), centroid.clear();
        for (int64_t page = 0; page < l.pages; ++page) {
            if (!granule.page_valid[page]) continue;
            if (side == KEYS) w.page.push_back(page);
            const uint8_t* record = granule.records + page * granule.page_stride;
            load_halves(record + l.scan[side], l.tokens, scales[0]);
            if (l.scan_bits[side] < l.bits[side]) load_halves(record + l.full[side], l.tokens, scales[1]);
            load_halves(record + l.centroid[side], l.dim, centroid);
        }
    }
}

// top[r][t] = sum over d of codes[r][d] * scanned code of token t, the planes weighted 2^(S-1) .. 1.
inline void scan_keys(const Layout& l, const Granule& granule, const int8_t* codes, int64_t rows, Work& w) {
    const int64_t total = int64_t(w.page.size()) * l.tokens, words = l.dim / 4 * (l.tokens / 8);
    w.top.resize(rows * total), w.dots.resize(rows * l.tokens);
    for (size_t index = 0; index < w.page.size(); ++index) {
        const uint32_t* plane = reinterpret_cast<const uint32_t*>(granule.records + w.page[index] * granule.page_stride + l.planes[KEYS]);
        for (int64_t s = 0; s < l.scan_bits[KEYS]; ++s) {
            plane_dot(plane + s * words, l.dim / 4, l.tokens / 8, reinterpret_cast<const int32_t*>(codes), l.dim / 4, rows, w.dots.data());
            for (int64_t r = 0; r < rows; ++r) {
                int32_t* top = &w.top[r * total + int64_t(index) * l.tokens];
                const int32_t* dots = &w.dots[r * l.tokens];
                if (s == 0) std::memcpy(top, dots, l.tokens * sizeof(int32_t));
                else for (int64_t t = 0; t < l.tokens; ++t) top[t] = 2 * top[t] + dots[t];
            }
        }
    }
}

// Weights fp32 [P] -> operands 0..127 of plane_dot, packed four to a word; returns their scale, max / 127.
inline float quantize_weights(const float* weights, int64_t tokens, int32_t* operands) {
    const float peak = max16(weights, tokens), divisor = peak == 0.0f ? 1.0f : peak;
    uint8_t* bytes = reinterpret_cast<uint8_t*>(operands);
    for (int64_t t = 0; t < tokens; ++t) bytes[t] = uint8_t(round_int(127.0f * weights[t] / divisor));
    return peak / 127.0f;
}

inline int32_t byte_sum(const int32_t* operands, int64_t tokens) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(operands);
    int32_t sum = 0;
    for (int64_t t = 0; t < tokens; ++t) sum += bytes[t];
    return sum;
}

// integers[r][d] = sum over t of weight * code with the scanned planes of one page.
inline void scan_values(const Layout& l, const uint8_t* record, const int32_t* operands, int64_t rows, Work& w, std::vector<int32_t>& integers) {
    const int64_t words = l.tokens / 4 * (l.dim / 8);
    const uint32_t* plane = reinterpret_cast<const uint32_t*>(record + l.planes[VALUES]);
    integers.assign(rows * l.dim, 0);
    w.dots.resize(rows * l.dim);
    for (int64_t s = 0; s < l.scan_bits[VALUES]; ++s) {
        plane_dot(plane + s * words, l.tokens / 4, l.dim / 8, operands, l.tokens / 4, rows, w.dots.data());
        for (int64_t i = 0; i < rows * l.dim; ++i) integers[i] = 2 * integers[i] + w.dots[i];
    }
}

inline int64_t attend(const Layout& l, const Queries& q, int64_t head, const Granule& granule, const Refinement& refine, PartialOut out) {
    thread_local Work w;
    const int64_t P = l.tokens, D = l.dim, G = q.group;
    load_page_metadata(l, granule, w);
    const int64_t pages = int64_t(w.page.size()), total = pages * P;
    const int64_t key_low = l.bits[KEYS] - l.scan_bits[KEYS], value_low = l.bits[VALUES] - l.scan_bits[VALUES];
    const int64_t chosen = std::min<int64_t>(total, std::max<int64_t>(refine.min_tokens, int64_t(std::ceil(double(total) * refine.share))));
    std::vector<int32_t> integers, refined;
    std::vector<float> value_scale(G), refined_scale(G);
    int64_t refined_tokens = 0;

    for (int64_t query = 0; query < q.count; ++query) {
        const int64_t row0 = (head * q.count + query) * G;
        float *m = out.m + query * G, *sum = out.l + query * G, *o = out.o + query * G * D;
        std::memset(o, 0, G * D * sizeof(float));
        if (total == 0) {
            for (int64_t r = 0; r < G; ++r) m[r] = -INFINITY, sum[r] = 0.0f;
            continue;
        }
        scan_keys(l, granule, q.codes + row0 * D, G, w);
        w.scores.resize(G * total), w.fold.resize(D);
        const int32_t middle = (1 << l.scan_bits[KEYS]) - 1, full_middle = (1 << l.bits[KEYS]) - 1;
        std::vector<int32_t> code_sum(G);
        std::vector<float> base(G * pages);
        for (int64_t r = 0; r < G; ++r) {
            const int64_t row = row0 + r;
            const int8_t* codes = q.codes + row * D;
            for (int64_t d = 0; d < D; ++d) code_sum[r] += codes[d];
            const float scale = q.scale[row], unit = level_unit(l.scan_bits[KEYS]), noise = q.norm2[row] * refine.scan_noise;
            for (int64_t page = 0; page < pages; ++page) {
                for (int64_t d = 0; d < D; ++d) w.fold[d] = q.rotated[row * D + d] * w.key_centroid[page * D + d];
                const float c = base[r * pages + page] = fold_sum(w.fold.data(), D);
                const float* a = &w.key_scale[0][page * P];
                const int32_t* top = &w.top[r * total + page * P];
                float* score = &w.scores[r * total + page * P];
                for (int64_t t = 0; t < P; ++t) {
                    const float integer = float(2 * top[t] - middle * code_sum[r]);
                    score[t] = (integer * scale * (a[t] * unit) + noise * (a[t] * a[t])) + c;
                }
            }
        }

        if (refine.enabled) {
            w.keys.resize(total), w.rank.resize(total), w.p.resize(total);
            auto rescore = [&](int64_t r) {
                if (!key_low) return;
                const int64_t row = row0 + r;
                const float scale = q.scale[row], noise = q.norm2[row] * refine.full_noise;
                for (const int32_t t : w.selected) {
                    const int64_t page = t / P;
                    const uint8_t* low = granule.records + w.page[page] * granule.page_stride + l.low[KEYS] + (t % P) * (key_low * D / 8);
                    const int32_t dot = (w.top[r * total + t] << key_low) + low_dot(low, key_low, D, q.codes + row * D);
                    const float integer = float(2 * dot - full_middle * code_sum[r]), a = w.key_scale[1][t];
                    w.scores[r * total + t] = (integer * scale * (a * 0.5f) + noise * (a * a)) + base[r * pages + page];
                }
            };
            w.refined_weights.assign(G * total, 0);  // marks, until weights replace them
            auto mark = [&](int64_t r) { for (const int32_t t : w.selected) w.refined_weights[r * total + t] = 1; };
            if (refine.group && G > 1) {
                for (int64_t r = 0; r < G; ++r) {
                    const float* score = &w.scores[r * total];
                    const float peak = max16(score, total);
                    exp2_shifted(score, peak, total, w.p.data());
                    const float lse = peak + std::log2(sum16(w.p.data(), total));
                    for (int64_t t = 0; t < total; ++t) {
                        const float rank = score[t] - lse;
                        w.rank[t] = r == 0 || rank > w.rank[t] ? rank : w.rank[t];
                    }
                }
                for (int64_t t = 0; t < total; ++t) w.keys[t] = ordered(w.rank[t]);
                largest(w.keys.data(), total, chosen, w.selected);
                for (int64_t r = 0; r < G; ++r) rescore(r), mark(r);
                refined_tokens += int64_t(w.selected.size());
            } else {
                for (int64_t r = 0; r < G; ++r) {
                    for (int64_t t = 0; t < total; ++t) w.keys[t] = ordered(w.scores[r * total + t]);
                    largest(w.keys.data(), total, chosen, w.selected);
                    rescore(r), mark(r);
                }
                for (int64_t t = 0; t < total; ++t) {
                    int32_t any = 0;
                    for (int64_t r = 0; r < G; ++r) any |= w.refined_weights[r * total + t];
                    refined_tokens += any;
                }
            }
        }

        w.p.resize(G * total);
        for (int64_t r = 0; r < G; ++r) {
            const float* score = &w.scores[r * total];
            m[r] = max16(score, total);
            exp2_shifted(score, m[r], total, &w.p[r * total]);
            sum[r] = 0.0f;
        }

        const bool split = refine.enabled && value_low;
        w.weights.resize(G * P / 4), w.fold.resize(P);
        std::vector<int32_t> operands(G * P / 4);
        for (int64_t page = 0; page < pages; ++page) {
            const uint8_t* record = granule.records + w.page[page] * granule.page_stride;
            for (int64_t r = 0; r < G; ++r) {
                const float* p = &w.p[r * total + page * P];
                const float* a = &w.value_scale[0][page * P];
                const float mass = sum16(p, P);
                sum[r] += mass;
                for (int64_t d = 0; d < D; ++d) o[r * D + d] += mass * w.value_centroid[page * D + d];
                for (int64_t t = 0; t < P; ++t) w.fold[t] = p[t] * a[t];
                if (split) {
                    const int32_t* marks = &w.refined_weights[r * total + page * P];
                    for (int64_t t = 0; t < P; ++t) w.fold[t] = marks[t] ? 0.0f : w.fold[t];
                }
                value_scale[r] = quantize_weights(w.fold.data(), P, &w.weights[r * P / 4]);
                if (split) {
                    const int32_t* marks = &w.refined_weights[r * total + page * P];
                    const float* full = &w.value_scale[1][page * P];
                    for (int64_t t = 0; t < P; ++t) w.fold[t] = marks[t] ? p[t] * full[t] : 0.0f;
                    refined_scale[r] = quantize_weights(w.fold.data(), P, &operands[r * P / 4]);
                }
            }
            scan_values(l, record, w.weights.data(), G, w, integers);
            const int32_t value_middle = (1 << l.scan_bits[VALUES]) - 1;
            for (int64_t r = 0; r < G; ++r) {
                const int32_t offset = value_middle * byte_sum(&w.weights[r * P / 4], P);
                const float scale = value_scale[r] * level_unit(l.scan_bits[VALUES]);
                for (int64_t d = 0; d < D; ++d) o[r * D + d] += float(2 * integers[r * D + d] - offset) * scale;
            }
            if (!split) continue;
            scan_values(l, record, operands.data(), G, w, refined);
            const int32_t full_value_middle = (1 << l.bits[VALUES]) - 1;
            for (int64_t r = 0; r < G; ++r) {
                const uint8_t* weight = reinterpret_cast<const uint8_t*>(&operands[r * P / 4]);
                int32_t* code = &refined[r * D];
                for (int64_t d = 0; d < D; ++d) code[d] <<= value_low;
                for (int64_t t = 0; t < P; ++t)
                    if (weight[t]) low_add(record + l.low[VALUES] + t * (value_low * D / 8), value_low, D, weight[t], code);
                const int32_t offset = full_value_middle * byte_sum(&operands[r * P / 4], P);
                const float scale = refined_scale[r] * 0.5f;
                for (int64_t d = 0; d < D; ++d) o[r * D + d] += float(2 * code[d] - offset) * scale;
            }
        }
    }
    return refined_tokens;
}

// Merge of partials (bitkv_dist/partial.py) into the first; an empty side is passed over without arithmetic.
inline void merge(int64_t rows, int64_t dim, float* m, float* l, float* o, const float* m2, const float* l2, const float* o2) {
    for (int64_t r = 0; r < rows; ++r) {
        if (m2[r] == -INFINITY) {
            if (m[r] == -INFINITY) {
                l[r] = 0.0f;
                std::memset(o + r * dim, 0, dim * sizeof(float));
            }
        } else if (m[r] == -INFINITY) {
            m[r] = m2[r], l[r] = l2[r];
            std::memcpy(o + r * dim, o2 + r * dim, dim * sizeof(float));
        } else {
            const float peak = m[r] > m2[r] ? m[r] : m2[r];
            const float a = exp2_fast(m[r] - peak), b = exp2_fast(m2[r] - peak);
            m[r] = m[r] != m[r] || m2[r] != m2[r] ? NAN : peak;
            l[r] = l[r] * a + l2[r] * b;
            for (int64_t d = 0; d < dim; ++d) o[r * dim + d] = o[r * dim + d] * a + o2[r * dim + d] * b;
        }
    }
}

inline void attend_exact(int64_t dim, int64_t count, int64_t row_stride, const float* q, const float* k, const float* v, float* m, float* l, float* o) {
    thread_local std::vector<float> p, product;
    std::memset(o, 0, dim * sizeof(float));
    *m = -INFINITY, *l = 0.0f;
    if (count == 0) return;
    p.resize(count), product.resize(dim);
    for (int64_t t = 0; t < count; ++t) {
        for (int64_t d = 0; d < dim; ++d) product[d] = q[d] * k[t * row_stride + d];
        p[t] = sum16(product.data(), dim);
    }
    *m = max16(p.data(), count);
    const float peak = *m;
    for (int64_t t = 0; t < count; ++t) p[t] = exp2_fast(p[t] - peak);
    *l = sum16(p.data(), count);
    for (int64_t t = 0; t < count; ++t)
        for (int64_t d = 0; d < dim; ++d) o[d] += p[t] * v[t * row_stride + d];
}

}  // namespace
