#include "attend.hpp"
#include "encode.hpp"

namespace bitkv {

const Kernels& portable_kernels() {
    static const Kernels kernels = {"portable", plane_dot, encode, quantize_query, attend, merge, rotate_back, attend_exact};
    return kernels;
}

}  // namespace bitkv
