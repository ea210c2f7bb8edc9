#include "table.hpp"

const bitkv::Kernels& bitkv::portable_kernels() {
    static const Kernels kernels = table("portable");
    return kernels;
}
