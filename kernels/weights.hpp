// How weights of each type become vectors of one path's Simd.
#pragma once

#include "types.hpp"

namespace overspill {
namespace {

using F = Simd::F;
constexpr int V = Simd::lanes;

OVERSPILL_INLINE void fetch(const char* address) { __builtin_prefetch(address, 0, 3); }

// How values of a type lie in memory and become float vectors: `halves` vectors of V from a step of halves * V values.
template <Type type>
struct Weights;

template <>
struct Weights<Type::float32> {
    using Value = float;
    static constexpr int halves = 1;
    using Raw = F;
    OVERSPILL_INLINE Raw step(const Value* from) { return Simd::load(from); }
    template <int half>
    OVERSPILL_INLINE F part(Raw raw) { return raw; }
    OVERSPILL_INLINE F plain(const Value* from) { return Simd::load(from); }
};

template <>
struct Weights<Type::bfloat16> {
    using Value = uint16_t;
    static constexpr int halves = 2;
    using Raw = Simd::I;
    OVERSPILL_INLINE Raw step(const Value* from) { return Simd::load_pairs(from); }
    template <int half>
    OVERSPILL_INLINE F part(Raw raw) { return half ? Simd::odd(raw) : Simd::even(raw); }
    OVERSPILL_INLINE F plain(const Value* from) { return F(__builtin_convertvector(Simd::load_short(from), Simd::I) << 16); }
};

template <>
struct Weights<Type::float16> {
    using Value = uint16_t;
    static constexpr int halves = 1;
    using Raw = F;
    OVERSPILL_INLINE Raw step(const Value* from) { return Simd::load_half(from); }
    template <int half>
    OVERSPILL_INLINE F part(Raw raw) { return raw; }
    OVERSPILL_INLINE F plain(const Value* from) { return Simd::load_half(from); }
};

// Loops over registers: the compiler must not keep an array of them in memory.
#define OVERSPILL_UNROLL _Pragma("GCC unroll 16")

}  // namespace
}  // namespace overspill
