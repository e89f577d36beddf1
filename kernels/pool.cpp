#include "pool.hpp"

#include <unistd.h>

#include <chrono>
#include <thread>

namespace overspill {
namespace {

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits a moment for what other cores are about to do, then lets others run.
template <class Done>
void wait_for(Done done) {
    for (int spins = 0; !done(); ++spins) spins < 2000 ? pause() : std::this_thread::yield();
}

struct OfProcess {
    pid_t process;
    Pool pool;
};

std::atomic<OfProcess*> current{nullptr};

}  // namespace

Pool& Pool::of_process() {
    OfProcess* found = current.load(std::memory_order_acquire);
    const pid_t process = getpid();
    while (!found || found->process != process) {
        auto* made = new OfProcess{process, {}};
        if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return made->pool;
        delete made;  // another thread was first
    }
    return found->pool;
}

void Pool::run(Work& work, int threads) {
    for (; workers_ < threads - 1; ++workers_) std::thread(&Pool::serve, this, workers_).detach();
    if (threads > 1) {
        {
            const std::lock_guard lock(state_);
            work_ = &work;
            wanted_ = threads - 1;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
    }
    take_part(work);
    if (threads > 1) {
        {
            const std::lock_guard lock(state_);
            work_ = nullptr;
        }
        wait_for([&] { return inside_.load(std::memory_order_acquire) == 0; });
    }
}

void Pool::serve(int number) {
    uint64_t seen = 0;
    const auto news = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    for (;;) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
        while (!news() && std::chrono::steady_clock::now() < until) pause();
        Work* work = nullptr;
        {
            std::unique_lock lock(state_);
            wake_.wait(lock, news);
            seen = generation_.load(std::memory_order_relaxed);
            if (work_ && number < wanted_) {
                work = work_;
                inside_.fetch_add(1, std::memory_order_relaxed);
            }
        }
        if (!work) continue;
        take_part(*work);
        inside_.fetch_sub(1, std::memory_order_release);
    }
}

void Pool::take_part(Work& work) {
    for (int phase = 0; phase < work.phases; ++phase) {
        auto& progress = work.progress_[phase];
        const size_t tasks = work.tasks[phase];
        for (size_t task; (task = progress.claimed.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
            work.run(phase, task);
            progress.done.fetch_add(1, std::memory_order_release);
        }
        wait_for([&] { return progress.done.load(std::memory_order_acquire) >= tasks; });
    }
}

}  // namespace overspill
