// A few threads that stay, for work of milliseconds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "scratch.hpp"

namespace overspill {

// Work in phases: all tasks of a phase are done before the next one's begin. Tasks of a phase run in any order.
class Work {
  public:
    static constexpr int most_phases = 3;
    virtual void run(int phase, size_t task) = 0;

    int phases = 0;
    size_t tasks[most_phases] = {};

  protected:
    ~Work() = default;

  private:
    friend class Pool;
    struct alignas(64) Progress {
        std::atomic<size_t> claimed{0};
        std::atomic<size_t> done{0};
    };
    Progress progress_[most_phases];
};

class Pool {
  public:
    // The process's pool; a forked child has its own, as threads do not survive a fork. Never destroyed.
    static Pool& of_process();

    // Runs `work` on the calling thread and `threads` - 1 others.
    void run(Work& work, int threads);

    std::mutex calls;  // held around `run` and around all use of the scratch memory: one call at a time
    Scratch prepared, inner, sums;

  private:
    void serve(int number);
    static void take_part(Work& work);

    std::mutex state_;
    std::condition_variable wake_;
    Work* work_ = nullptr;  // under state_
    int wanted_ = 0;        // workers that may take part in it, under state_
    int workers_ = 0;
    std::atomic<uint64_t> generation_{0};
    std::atomic<int> inside_{0};
};

}  // namespace overspill
