#include <algorithm>
#include <vector>

#include "experts.hpp"
#include "pool.hpp"

namespace overspill {
namespace {

constexpr size_t line_bytes = 64, part_lines = 8192;

class Reading final : public Work {
  public:
    Reading(const Path& path, const void* address, size_t bytes)
        : path_(path), from_(static_cast<const char*>(address)), lines_(bytes / line_bytes) {
        phases = 1;
        tasks[0] = (lines_ + part_lines - 1) / part_lines;
        sums.resize(tasks[0]);
    }

    void run(int, size_t task) override {
        const size_t first = task * part_lines;
        sums[task] = path_.read(from_ + first * line_bytes, std::min(part_lines, lines_ - first));
    }

    std::vector<float> sums;

  private:
    const Path& path_;
    const char* from_;
    size_t lines_;
};

}  // namespace

float read_memory(const Path& path, const void* address, size_t bytes, int threads) {
    Pool& pool = Pool::of_process();
    const std::lock_guard lock(pool.calls);
    Reading reading(path, address, bytes);
    pool.run(reading, threads);
    float sum = 0;
    for (const float part : reading.sums) sum += part;
    return sum;
}

}  // namespace overspill
