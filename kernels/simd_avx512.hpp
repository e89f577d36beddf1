// AVX512_BF16's vdpbf16ps is not used: on Sapphire Rapids it does half of what FMA does (75 against 105 GFLOP/s of a
// core), for one instruction less in five, and it would round what lies between the products to bfloat16.
#pragma once

#include <immintrin.h>

#include "lanes.hpp"

namespace overspill {
namespace {

struct Simd : Lanes<16> {
    static constexpr int tokens = 6;  // 24 accumulators of 32 registers

    OVERSPILL_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    OVERSPILL_INLINE F load_half(const uint16_t* from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    OVERSPILL_INLINE float sum(F v) {
        const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
        s = _mm_add_ps(s, _mm_movehdup_ps(s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehl_ps(s, s)));
    }
    // Four sums in the order of `sum`.
    OVERSPILL_INLINE void sum4(F a, F b, F c, F d, float* to) {
        const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
        __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
        s = _mm512_add_ps(s, _mm512_movehdup_ps(s));
        s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
        const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, s)));
    }
};

}  // namespace
}  // namespace overspill
