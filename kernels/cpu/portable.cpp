#include "attend.hpp"
#include "encode.hpp"
#include "linear.hpp"
#include "merge.hpp"

namespace bitkv {

const Kernels& portable_kernels() {
    static const Kernels kernels = {"portable", plane_dot, select, encode, quantize_query, attend, merge, rotate_back, attend_exact,
                                    linear, rms_norm, rotary, gated, nullptr};
    return kernels;
}

}  // namespace bitkv
