// Work in phases, each of which needs all of the one before, on the pool's threads without a sleep in between.
#pragma once
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "pool.hpp"

namespace bitkv {

struct Phase {
    int64_t count;
    std::function<void(int64_t)> task;   // task(0) .. task(count - 1), in any order
    std::function<void()> after;         // once all are done; may be empty
};

// Whoever ends the last task of a phase opens the next: nobody waits for a thread that has not woken yet.
inline void run_phases(const std::vector<Phase>& phases, int64_t threads) {
    if (threads <= 1) {
        for (const Phase& phase : phases) {
            for (int64_t i = 0; i < phase.count; ++i) phase.task(i);
            if (phase.after) phase.after();
        }
        return;
    }
    struct Counters {
        std::atomic<int64_t> next{0}, done{0};
    };
    std::vector<Counters> counters(phases.size());
    std::atomic<size_t> open{0};
    Pool::instance().run(threads, threads, [&](int64_t) {
        for (size_t p = 0; p < phases.size(); ++p) {
            for (int64_t spins = 0; open.load(std::memory_order_acquire) < p; ++spins)
                if (spins > 2000) std::this_thread::yield();
            const Phase& phase = phases[p];
            for (int64_t i; (i = counters[p].next.fetch_add(1)) < phase.count;) {
                phase.task(i);
                if (counters[p].done.fetch_add(1, std::memory_order_acq_rel) + 1 == phase.count) {
                    if (phase.after) phase.after();
                    open.store(p + 1, std::memory_order_release);
                }
            }
        }
    });
}

}  // namespace bitkv
