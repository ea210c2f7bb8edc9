// Vectors that only ever grow, at the start of a line of the cache: a register stored across two lines takes twice as long.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace bitkv {

template <class T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};

    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}

    T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), LINE)); }
    void deallocate(T* p, std::size_t) { ::operator delete(p, LINE); }
    bool operator==(const LineAllocator&) const { return true; }
    bool operator!=(const LineAllocator&) const { return false; }
};

template <class T>
using Room = std::vector<T, LineAllocator<T>>;

// Makes room for n values, of which none is kept.
template <class T, class A>
inline T* room(std::vector<T, A>& v, int64_t n) {
    if (int64_t(v.size()) < n) v.resize(size_t(n));
    return v.data();
}

}  // namespace bitkv
