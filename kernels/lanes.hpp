// What every width of vector has in common. Internal to each path's translation unit: the same template compiled with
// other instruction sets must not be merged by the linker.
#pragma once

#include <cstdint>
#include <cstring>

#define OVERSPILL_INLINE [[gnu::always_inline]] static inline

namespace overspill {
namespace {

template <int N>
struct Lanes {
    static constexpr int lanes = N;
    typedef float F __attribute__((vector_size(4 * N)));
    typedef int32_t I __attribute__((vector_size(4 * N)));
    typedef uint16_t Short __attribute__((vector_size(2 * N)));

    OVERSPILL_INLINE F zero() { return F{}; }
    OVERSPILL_INLINE F all(float value) { return value - F{}; }
    OVERSPILL_INLINE F load(const float* from) {
        F v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
    OVERSPILL_INLINE void store(float* to, F v) { std::memcpy(to, &v, sizeof v); }
    OVERSPILL_INLINE Short load_short(const uint16_t* from) {
        Short v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
    // 2 N bfloat16: a float has the same bits in its upper half, so one vector holds the N at even places in the upper
    // halves after a shift, and those at odd places as they lie.
    OVERSPILL_INLINE I load_pairs(const uint16_t* from) {
        I v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
    OVERSPILL_INLINE F even(I pairs) { return F(pairs << 16); }
    OVERSPILL_INLINE F odd(I pairs) { return F(pairs & int32_t(0xffff0000)); }
};

}  // namespace
}  // namespace overspill
