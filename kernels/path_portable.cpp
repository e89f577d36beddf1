#include "simd_portable.hpp"

#include "elementwise.hpp"

namespace overspill {

const Path& portable_path() {
    static constexpr Path found = path("portable");
    return found;
}

}  // namespace overspill
