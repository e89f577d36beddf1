#include "simd_avx2.hpp"

#include "path.hpp"

namespace overspill {

const Path& avx2_path() {
    static constexpr Path found = path("avx2");
    return found;
}

}  // namespace overspill
