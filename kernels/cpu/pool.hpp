// One pool of threads for the process. Workers spin for a moment after a call, then sleep: the calls of a decode step follow each other
// closely, and torch's own threads, which work in between prompts, never compete with spinning ones for long.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace bitkv {

class Pool {
public:
    static Pool& instance() {
        static Pool* pool = new Pool;  // never destroyed: workers may outlive static destruction
        return *pool;
    }

    // Runs task(0) .. task(count - 1) on up to `threads` threads, the caller among them. One call at a time.
    void run(int64_t count, int64_t threads, const std::function<void(int64_t)>& task) {
        const int64_t helpers = std::min(threads, count) - 1;
        if (helpers <= 0) {
            for (int64_t i = 0; i < count; ++i) task(i);
            return;
        }
        std::lock_guard<std::mutex> one_call(calls_);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (int64_t(workers_) < helpers) std::thread(&Pool::work, this, workers_++).detach();
            task_ = &task, count_ = count, next_ = 0, wanted_ = helpers, busy_ = helpers;
            ++generation_;
        }
        if (asleep_) wake_.notify_all();
        drain();
        spin([&] { return busy_ == 0; });
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return busy_ == 0; });
    }

private:
    static constexpr std::chrono::microseconds SPIN{200};  // the calls of a decode step follow each other within it

    void drain() {
        for (int64_t i; (i = next_.fetch_add(1)) < count_;) (*task_)(i);
    }

    // Waits a little for what another thread is about to do: waking a sleeping thread takes longer than most calls.
    template <class Condition>
    static void spin(const Condition& met) {
        const auto until = std::chrono::steady_clock::now() + SPIN;
        while (!met() && std::chrono::steady_clock::now() < until) pause();
    }

    static void pause() {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }

    void work(int64_t index) {
        uint64_t seen = 0;
        for (;;) {
            spin([&] { return generation_ != seen; });
            std::unique_lock<std::mutex> lock(mutex_);
            ++asleep_;
            wake_.wait(lock, [&] { return generation_ != seen; });
            --asleep_;
            seen = generation_;
            if (index >= wanted_) continue;
            lock.unlock();
            drain();
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::mutex calls_, mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(int64_t)>* task_ = nullptr;
    std::atomic<int64_t> next_{0};
    int64_t count_ = 0, workers_ = 0, wanted_ = 0;
    std::atomic<int64_t> busy_{0}, asleep_{0};
    std::atomic<uint64_t> generation_{0};
};

}  // namespace bitkv
