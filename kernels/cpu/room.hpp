// Vectors that only ever grow.
#pragma once
#include <cstdint>
#include <vector>

namespace {

// Makes room for n values, of which none is kept.
template <class T>
inline T* room(std::vector<T>& v, int64_t n) {
    if (int64_t(v.size()) < n) v.resize(size_t(n));
    return v.data();
}

}  // namespace
