#include "table.hpp"

const bitkv::Kernels& bitkv::avxvnni_kernels() {
    static const Kernels kernels = table("avxvnni");
    return kernels;
}
