#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace overspill {

// Memory kept from call to call, as large as the largest took. Aligned to cache lines; what was in it is lost.
class Scratch {
  public:
    float* take(size_t floats) {
        if (floats > size_) {
            memory_.reset();
            memory_.reset(static_cast<float*>(::operator new(floats * sizeof(float), alignment)));
            size_ = floats;
        }
        return memory_.get();
    }

  private:
    static constexpr std::align_val_t alignment{64};
    struct Free {
        void operator()(float* memory) const { ::operator delete(memory, alignment); }
    };
    std::unique_ptr<float, Free> memory_;
    size_t size_ = 0;
};

}  // namespace overspill
