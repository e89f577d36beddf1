#pragma once

#include <immintrin.h>

#include "lanes.hpp"

namespace overspill {
namespace {

struct Simd : Lanes<8> {
    static constexpr int tokens = 3;  // 12 accumulators of 16 registers

    OVERSPILL_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    OVERSPILL_INLINE F load_half(const uint16_t* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    OVERSPILL_INLINE float sum(F v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehdup_ps(s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehl_ps(s, s)));
    }
    // Four sums in the order of `sum`.
    OVERSPILL_INLINE void sum4(F a, F b, F c, F d, float* to) {
        const __m256 s = _mm256_hadd_ps(_mm256_add_ps(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31)),
                                        _mm256_add_ps(_mm256_permute2f128_ps(b, d, 0x20), _mm256_permute2f128_ps(b, d, 0x31)));
        const __m256 t = _mm256_hadd_ps(s, s);  // a b a b | c d c d
        _mm_storeu_ps(to, _mm_movelh_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
    }
};

}  // namespace
}  // namespace overspill
