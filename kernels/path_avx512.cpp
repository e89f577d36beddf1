#include "simd_avx512.hpp"

#include "path.hpp"

namespace overspill {

const Path& avx512_path() {
    static constexpr Path found = path("avx512");
    return found;
}

}  // namespace overspill
