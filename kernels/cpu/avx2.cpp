#include "table.hpp"

const bitkv::Kernels& bitkv::avx2_kernels() {
    static const Kernels kernels = table("avx2");
    return kernels;
}
