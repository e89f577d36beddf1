// Vectors that any compiler with GCC's vector extensions turns into what the target has.
#pragma once

#include <cstring>

#include "lanes.hpp"

namespace overspill {
namespace {

struct Simd : Lanes<8> {
    static constexpr int tokens = 2;  // accumulators of a tile: 4 rows x tokens

    static F fma(F a, F b, F c) { return a * b + c; }
    static F load_half(const uint16_t* from) {
        const I bits = __builtin_convertvector(load_short(from), I);
        const I magnitude = (bits & 0x7fff) << 13;
        // A float whose exponent is 112 too small; infinities and NaN keep all exponent bits.
        const F scaled = F(magnitude) * 0x1p112f;
        const I special = (bits & 0x7c00) == 0x7c00;
        return F((I(scaled) & ~special) | ((magnitude | 0x7f800000) & special) | ((bits & 0x8000) << 16));
    }
    OVERSPILL_INLINE float sum(F v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }
    OVERSPILL_INLINE void sum4(F a, F b, F c, F d, float* to) {
        to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
    }
};

}  // namespace
}  // namespace overspill
