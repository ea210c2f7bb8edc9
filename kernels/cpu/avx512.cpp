#include "attend.hpp"
#include "encode.hpp"
#include "linear.hpp"
#include "merge.hpp"
#include "prompt.hpp"

namespace bitkv {

const Kernels& avx512_kernels() {
    static const Kernels kernels = {"avx512", plane_dot, select, encode, quantize_query, attend, merge, rotate_back, attend_exact,
                                    linear, rms_norm, rotary, gated, attend_prompt};
    return kernels;
}

}  // namespace bitkv
