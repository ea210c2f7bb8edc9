// All kernels as one instruction set's build of these headers has them.
#pragma once
#include "attend.hpp"
#include "encode.hpp"
#include "linear.hpp"
#include "merge.hpp"
#ifdef __AVX2__
#include "prompt.hpp"
#endif

namespace {

inline void dot_one(const uint8_t* words, int64_t planes, int64_t height, int64_t width, const int8_t* operands, int64_t stride, int64_t rows, int32_t* out, int64_t out_stride) {
    Ahead nothing;
    level_dot(&words, 1, planes, height, width, operands, stride, rows, out, out_stride, nothing);
}

inline void select_positions(int64_t rows, int64_t total, const float* scores, bool group, int64_t count, int32_t* positions) {
    std::vector<float> peak(rows), p(rows * total);
    Workspace s;
    select(rows, total, scores, group, count, positions, peak.data(), p.data(), s);
}

inline bitkv::Kernels table(const char* name) {
#ifdef __AVX2__
    const auto prompt = attend_prompt;
#else
    const auto prompt = nullptr;
#endif
    return {name, dot_one, select_positions, encode, quantize_query, attend, merge, rotate_back, attend_exact, linear, rms_norm, rotary, gated, prompt};
}

}  // namespace
