#include "prompt_bfloat16.hpp"

const bitkv::Kernels& bitkv::avx512bf16_kernels() {
    static const Kernels kernels = [] {
        Kernels found = avx512_kernels();
        found.name = "avx512bf16", found.attend_prompt_bfloat16 = attend_prompt_bfloat16;
        return found;
    }();
    return kernels;
}
