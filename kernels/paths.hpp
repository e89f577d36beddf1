#pragma once

#include "types.hpp"

namespace overspill {

// Fastest first.
constexpr const char* path_names[] = {"avx512", "avx2", "portable"};

// Null where this build or this processor lacks it.
const Path* path_named(const char* name);

}  // namespace overspill
