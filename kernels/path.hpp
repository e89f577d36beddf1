// One path, over its Simd. Included once by each path's translation unit.
#pragma once

#include "columns.hpp"
#include "elementwise.hpp"
#include "rows.hpp"

namespace overspill {
namespace {

template <Type type>
void multiply_as(const Block& block, bool transposed) {
    transposed ? multiply_columns<type>(block) : multiply_halves<type>(block);
}

void multiply(const Block& block, Type weights, bool transposed) {
    switch (weights) {
        case Type::float32: return multiply_as<Type::float32>(block, transposed);
        case Type::bfloat16: return multiply_as<Type::bfloat16>(block, transposed);
        case Type::float16: return multiply_as<Type::float16>(block, transposed);
    }
}

// Several pages at once, each fetched ahead: one after the other they come more slowly.
float read(const void* lines, size_t count) {
    constexpr size_t pages = 8, page_lines = 64, line_floats = 16;
    const float* from = static_cast<const float*>(lines);
    F sums[pages] = {};
    const auto add = [&](size_t page, size_t line) {
        for (size_t v = 0; v < line_floats; v += V) sums[page] += Simd::load(from + line * line_floats + v);
    };
    size_t line = 0;
    for (; line + pages * page_lines <= count; line += pages * page_lines)
        for (size_t i = 0; i < page_lines; ++i)
            OVERSPILL_UNROLL for (size_t page = 0; page < pages; ++page) {
                const size_t here = line + page * page_lines + i;
                fetch(reinterpret_cast<const char*>(from + (here + pages * page_lines) * line_floats));
                add(page, here);
            }
    for (; line < count; ++line) add(0, line);
    F sum = sums[0];
    for (size_t page = 1; page < pages; ++page) sum += sums[page];
    return Simd::sum(sum);
}

constexpr Path path(const char* name) {
    return {name, prepared, prepare, multiply, activate, widen, narrow, read};
}

}  // namespace
}  // namespace overspill
