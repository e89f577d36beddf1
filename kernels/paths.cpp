#include "paths.hpp"

#include <cstring>

namespace overspill {

const Path* path_named(const char* name) {
#ifdef OVERSPILL_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!std::strcmp(name, "avx512")) return avx512 ? &avx512_path() : nullptr;
    if (!std::strcmp(name, "avx2")) return avx2 ? &avx2_path() : nullptr;
#endif
    return std::strcmp(name, "portable") ? nullptr : &portable_path();
}

}  // namespace overspill
