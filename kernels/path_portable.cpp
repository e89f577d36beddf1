#include "simd_portable.hpp"

#include "path.hpp"

namespace overspill {

const Path& portable_path() {
    static constexpr Path found = path("portable");
    return found;
}

}  // namespace overspill
