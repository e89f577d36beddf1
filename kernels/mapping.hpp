// A file mapped read-only, whose loss is noticed and survived.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace overspill {

// Reading a page that a file no longer has, or that its disk cannot give, is a bus error, which ends a process. Here the
// thread that met it reads zeros from there to the mapping's end and goes on; `lost` then says where, and whoever
// computed with the mapping must throw the result away.
class Mapping {
  public:
    static constexpr size_t nowhere = SIZE_MAX;

    // Maps the first `bytes` of the open file `fd`, which may be closed afterwards. Throws std::system_error.
    Mapping(int fd, size_t bytes);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    uintptr_t address() const { return begin_; }
    size_t bytes() const { return bytes_; }

    // The first byte that could not be read, `nowhere` where all could.
    size_t lost() const;

    // Maps the file again in the same place, after a loss. Throws std::system_error.
    void restore(int fd);

    // Reads a span of it into the page cache and maps its pages. A page that cannot be read stays away.
    void populate(size_t offset, size_t bytes) const;

  private:
    uintptr_t begin_;
    size_t bytes_;
    size_t entry_;  // in the handler's table
};

// Has bus errors come here first again, where another handler was set since the last mapping; that one gets those that
// are none of ours. Throws std::system_error.
void guard_mappings();

}  // namespace overspill
