// All kernels as one instruction set's build of these headers has them.
#pragma once
#include "attend.hpp"
#include "encode.hpp"
#include "left.hpp"
#include "linear.hpp"
#include "merge.hpp"
#ifdef __AVX2__
#include "prompt.hpp"
#endif

namespace {

inline void dot_one(const uint8_t* words, int64_t planes, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, int32_t* out, int64_t out_stride) {
    Ahead nothing;
    Operands prepared;
    prepared.set<true>(planes, height, operands, stride, rows);
    prepared.dot(words, width, out, out_stride, nothing);
}

inline void select_positions(int64_t rows, int64_t total, const float* scores, bool group, int64_t count, int32_t* positions) {
    std::vector<float> log_sum_exp(rows), p(total);
    for (int64_t r = 0; r < rows; ++r) {
        const float peak = max16(scores + r * total, total);
        log_sum_exp[r] = peak + std::log2(exp2_shifted(scores + r * total, peak, total, p.data()));
    }
    const int64_t lists = group ? 1 : rows;
    std::vector<int32_t> keys(total), some(total + 16), found(lists * count + 16);
    std::vector<uint16_t> taken(lists * (total / 16));
    select(rows, total, scores, log_sum_exp.data(), group, count, keys.data(), some.data(), found.data(), taken.data());
    std::copy_n(found.data(), lists * count, positions);
}

inline bitkv::Kernels table(const char* name) {
#ifdef __AVX2__
    const auto prompt = attend_prompt;
#else
    const auto prompt = nullptr;
#endif
    return {name, dot_one, select_positions, encode, quantize_query, attend, attend_words, merge, rotate_back, attend_exact, linear, widen, narrow, rms_norm, rotary, gated, prompt};
}

}  // namespace
