// Activations and conversions of one path, element by element, over its Simd.
#pragma once

#include <cmath>

#include "weights.hpp"

namespace overspill {
namespace {

// e^x for |x| <= 87, to two units in the last place; x beyond is taken as its limit. Cephes' expf polynomial.
OVERSPILL_INLINE F exponential(F x) {
    x = x < -87.0f ? F{} - 87.0f : x;
    x = x > 87.0f ? F{} + 87.0f : x;
    const F n = x * 1.44269504f + 12582912.0f - 12582912.0f;  // to the nearest integer
    F r = Simd::fma(n, Simd::all(-0.693359375f), x);
    r = Simd::fma(n, Simd::all(2.12194440e-4f), r);
    F p = Simd::all(1.9875691500e-4f);
    constexpr float rest[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (const float c : rest) p = Simd::fma(p, r, Simd::all(c));
    p = Simd::fma(p, r * r, r + 1.0f);
    return p * F((__builtin_convertvector(n, Simd::I) + 127) << 23);
}

template <Activation activation>
OVERSPILL_INLINE F activated(F x) {
    switch (activation) {
        case Activation::silu: return x / (1.0f + exponential(-x));
        case Activation::gelu_tanh: {
            // x / 2 (1 + tanh z) = x / (1 + e^(-2z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
            const F z = x * (0.7978845608f + 0.0356774081f * x * x);
            return x / (1.0f + exponential(-2.0f * z));
        }
        case Activation::gelu: {
            F y = {};
            for (int v = 0; v < V; ++v) y[v] = 0.5f * x[v] * (1.0f + erff(x[v] * 0.70710678f));
            return y;
        }
        case Activation::relu: return x < 0.0f ? F{} : x;
        case Activation::relu2: {
            const F y = x < 0.0f ? F{} : x;
            return y * y;
        }
    }
    __builtin_unreachable();
}

template <Activation activation>
void activate_as(float* gate, const float* up, size_t count) {
    for (size_t i = 0; i < count; i += V) {
        F y = activated<activation>(Simd::load(gate + i));
        if (up) y *= Simd::load(up + i);
        Simd::store(gate + i, y);
    }
}

void activate(Activation activation, float* gate, const float* up, size_t count) {
    switch (activation) {
        case Activation::silu: return activate_as<Activation::silu>(gate, up, count);
        case Activation::gelu: return activate_as<Activation::gelu>(gate, up, count);
        case Activation::gelu_tanh: return activate_as<Activation::gelu_tanh>(gate, up, count);
        case Activation::relu: return activate_as<Activation::relu>(gate, up, count);
        case Activation::relu2: return activate_as<Activation::relu2>(gate, up, count);
    }
}

template <Type type>
void widen_as(const typename Weights<type>::Value* values, size_t count, float* to) {
    size_t i = 0;
    for (; i + V <= count; i += V) Simd::store(to + i, Weights<type>::plain(values + i));
    if (i == count) return;
    typename Weights<type>::Value tail[V] = {};
    std::memcpy(tail, values + i, (count - i) * sizeof(*values));
    const F v = Weights<type>::plain(tail);
    std::memcpy(to + i, &v, (count - i) * sizeof(float));
}

void widen(const void* values, Type type, size_t count, float* to) {
    switch (type) {
        case Type::float32: return widen_as<Type::float32>(static_cast<const float*>(values), count, to);
        case Type::bfloat16: return widen_as<Type::bfloat16>(static_cast<const uint16_t*>(values), count, to);
        case Type::float16: return widen_as<Type::float16>(static_cast<const uint16_t*>(values), count, to);
    }
}

// Activations are padded to padded steps of two vectors, whatever the type of the weights.
size_t prepared(size_t depth) { return (depth + 2 * V - 1) / (2 * V) * (2 * V); }

void prepare(const void* values, Type type, size_t depth, Type weights, bool transposed, float* to) {
    widen(values, type, depth, to);
    const size_t padded = prepared(depth);
    std::memset(to + depth, 0, (padded - depth) * sizeof(float));
    if (weights != Type::bfloat16 || transposed) return;
    for (size_t k = 0; k < padded; k += 2 * V) {  // as the pairs of bfloat16 rows: even places first
        float pairs[2 * V];
        std::memcpy(pairs, to + k, sizeof pairs);
        for (int v = 0; v < V; ++v) {
            to[k + v] = pairs[2 * v];
            to[k + V + v] = pairs[2 * v + 1];
        }
    }
}

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// To the nearest, ties to even; a NaN stays one.
uint16_t to_bfloat16(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0 | (bits >> 16 & 0x8000);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

uint16_t to_float16(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7f800000) return 0x7e00 | sign;
    if (magnitude >= 0x477ff000) return 0x7c00 | sign;
    if (magnitude < 0x38800000) {  // subnormal: 0.5's unit in the last place is that of the result
        float half;
        std::memcpy(&half, &magnitude, sizeof half);
        return (bits_of(half + 0.5f) - bits_of(0.5f)) | sign;
    }
    return ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13) | sign;
}

void narrow(const float* values, size_t count, Type type, void* to) {
    if (type == Type::float32) {
        std::memcpy(to, values, count * sizeof(float));
        return;
    }
    uint16_t* out = static_cast<uint16_t*>(to);
    for (size_t i = 0; i < count; ++i) out[i] = type == Type::bfloat16 ? to_bfloat16(values[i]) : to_float16(values[i]);
}

}  // namespace
}  // namespace overspill
