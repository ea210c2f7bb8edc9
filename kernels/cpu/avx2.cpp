#include "attend.hpp"
#include "encode.hpp"

namespace bitkv {

const Kernels& avx2_kernels() {
    static const Kernels kernels = {"avx2", plane_dot, encode, quantize_query, attend, merge, rotate_back, attend_exact};
    return kernels;
}

}  // namespace bitkv
