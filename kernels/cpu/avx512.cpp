#include "table.hpp"

const bitkv::Kernels& bitkv::avx512_kernels() {
    static const Kernels kernels = table("avx512");
    return kernels;
}
