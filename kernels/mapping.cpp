#include "mapping.hpp"

#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <system_error>

namespace overspill {

namespace {

// What the signal handler reads: no locks, no memory of the heap.
struct Entry {
    std::atomic<uintptr_t> begin{0};  // 0: free
    std::atomic<uintptr_t> end{0};
    std::atomic<size_t> lost{Mapping::nowhere};
};

constexpr size_t most_mappings = 4096;
Entry entries[most_mappings];
std::mutex changes;  // of the table and of the signal's disposition
struct sigaction before_ours;

uintptr_t page_bytes() {
    static const uintptr_t bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

bool give_zeros(uintptr_t address) {
    for (Entry& entry : entries) {
        const uintptr_t begin = entry.begin.load(std::memory_order_acquire), end = entry.end.load();
        if (begin == 0 || address < begin || address >= end) continue;
        const uintptr_t page = address & ~(page_bytes() - 1);
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        if (mmap(pointer(page), end - page, PROT_READ, flags, -1, 0) == MAP_FAILED) return false;
        size_t offset = page - begin, known = entry.lost.load();
        while (offset < known && !entry.lost.compare_exchange_weak(known, offset)) {
        }
        return true;
    }
    return false;
}

// Ends the process as it would have ended without us.
void end(int signal) {
    struct sigaction by_default = {};
    by_default.sa_handler = SIG_DFL;
    sigaction(signal, &by_default, nullptr);
    raise(signal);
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
    static std::atomic<bool> passing_on{false};
    const bool fault = info->si_code > 0;  // and no signal that somebody sent
    const int kept = errno;
    const bool ours = fault && give_zeros(reinterpret_cast<uintptr_t>(info->si_addr));
    errno = kept;
    if (ours) return;
    const bool handled = (before_ours.sa_flags & SA_SIGINFO) || (before_ours.sa_handler != SIG_DFL && before_ours.sa_handler != SIG_IGN);
    if (!handled && before_ours.sa_handler == SIG_IGN && !fault) return;
    // A handler may hand the signal on to the one before itself, which may have been us.
    if (!handled || passing_on.exchange(true)) return end(signal);
    if (before_ours.sa_flags & SA_SIGINFO) {
        before_ours.sa_sigaction(signal, info, context);
    } else {
        before_ours.sa_handler(signal);
    }
    passing_on = false;
}

void take_signal() {
    page_bytes();
    struct sigaction now;
    if (sigaction(SIGBUS, nullptr, &now) != 0) fail("sigaction");
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return;
    before_ours = now;
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGBUS, &ours, nullptr) != 0) fail("sigaction");
}

}  // namespace

void guard_mappings() {
    const std::lock_guard<std::mutex> guard(changes);
    take_signal();
}

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
    const std::lock_guard<std::mutex> guard(changes);
    take_signal();
    Entry* const free = std::find_if(entries, entries + most_mappings, [](const Entry& e) { return e.begin == 0; });
    if (free == entries + most_mappings) {
        errno = EMFILE;
        fail("mmap");
    }
    void* const begin = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (begin == MAP_FAILED) fail("mmap");
    begin_ = reinterpret_cast<uintptr_t>(begin);
    entry_ = static_cast<size_t>(free - entries);
    free->lost = nowhere;
    free->end = begin_ + bytes;
    free->begin.store(begin_, std::memory_order_release);
}

Mapping::~Mapping() {
    const std::lock_guard<std::mutex> guard(changes);
    entries[entry_].begin = 0;
    munmap(pointer(begin_), bytes_);
}

size_t Mapping::lost() const { return entries[entry_].lost; }

void Mapping::restore(int fd) {
    const std::lock_guard<std::mutex> guard(changes);
    if (mmap(pointer(begin_), bytes_, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) fail("mmap");
    entries[entry_].lost = nowhere;
}

void Mapping::populate(size_t offset, size_t bytes) const {
    const uintptr_t first = (begin_ + offset) & ~(page_bytes() - 1), end = begin_ + std::min(bytes_, offset + bytes);
#ifdef MADV_POPULATE_READ
    if (madvise(pointer(first), end - first, MADV_POPULATE_READ) == 0 || errno == EFAULT) return;
#endif
    for (uintptr_t page = first; page < end; page += page_bytes()) {
        const volatile char* const byte = static_cast<const char*>(pointer(page));
        static_cast<void>(*byte);
    }
}

}  // namespace overspill
