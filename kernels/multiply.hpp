// The products of one path, over its Simd. Included once by each path's translation unit.
#pragma once

#include <type_traits>

#include "types.hpp"

namespace overspill {
namespace {

using F = Simd::F;
constexpr int V = Simd::lanes;

OVERSPILL_INLINE void fetch(const char* address) { __builtin_prefetch(address, 0, 3); }

template <int N>
using Number = std::integral_constant<int, N>;
constexpr int single_rows = 8;  // at once, for one token

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

// sums[r][m] += the step at `k` of R rows against M activations.
template <Type type, int R, int M>
OVERSPILL_INLINE void add_step(F (&sums)[R][M], const typename Weights<type>::Value* rows, size_t stride,
                               const float* const* activations, size_t k) {
    using W = Weights<type>;
    F x[M];
    OVERSPILL_UNROLL for (int m = 0; m < M; ++m) x[m] = Simd::load(activations[m] + k);
    OVERSPILL_UNROLL for (int r = 0; r < R; ++r) {
        const F w = W::template part<0>(W::step(rows + r * stride));
        OVERSPILL_UNROLL for (int m = 0; m < M; ++m) sums[r][m] = Simd::fma(w, x[m], sums[r][m]);
    }
    if (W::halves == 1) return;
    OVERSPILL_UNROLL for (int m = 0; m < M; ++m) x[m] = Simd::load(activations[m] + k + V);
    OVERSPILL_UNROLL for (int r = 0; r < R; ++r) {
        const F w = W::template part<W::halves - 1>(W::step(rows + r * stride));
        OVERSPILL_UNROLL for (int m = 0; m < M; ++m) sums[r][m] = Simd::fma(w, x[m], sums[r][m]);
    }
}

// R rows x M tokens, each product in one accumulator vector of its own that takes the steps in order. With `ahead` the
// R rows at `next` are fetched meanwhile.
template <Type type, int R, int M, bool ahead>
void tile(const Block& block, const typename Weights<type>::Value* rows, const float* const* activations, float* out,
          const char* next) {
    using Value = typename Weights<type>::Value;
    constexpr size_t step = Weights<type>::halves * V;
    F sums[R][M];
    OVERSPILL_UNROLL for (int r = 0; r < R; ++r)
        OVERSPILL_UNROLL for (int m = 0; m < M; ++m) sums[r][m] = Simd::zero();
    size_t k = 0;
    for (; k + step <= block.depth; k += step) {
        if (ahead)
            OVERSPILL_UNROLL for (int r = 0; r < R; ++r) fetch(next + (r * block.stride + k) * sizeof(Value));
        add_step<type>(sums, rows + k, block.stride, activations, k);
    }
    if (k < block.depth) {
        Value tail[R][step] = {};
        for (int r = 0; r < R; ++r) std::memcpy(tail[r], rows + r * block.stride + k, (block.depth - k) * sizeof(Value));
        add_step<type>(sums, tail[0], step, activations, k);
    }
    OVERSPILL_UNROLL for (int m = 0; m < M; ++m) {
        float* to = out + m * block.out_stride;
        if (R % 4 == 0) {
            OVERSPILL_UNROLL for (int r = 0; r + 3 < R; r += 4)
                Simd::sum4(sums[r][m], sums[r + 1][m], sums[r + 2][m], sums[r + 3][m], to + r);
        } else {
            OVERSPILL_UNROLL for (int r = 0; r < R; ++r) to[r] = Simd::sum(sums[r][m]);
        }
    }
}

// R rows from `r` on against all tokens, as many at a time as there are registers for.
template <Type type, int R>
void rows_by_tokens(const Block& block, size_t r) {
    constexpr size_t most = Simd::tokens;
    const auto* rows = static_cast<const typename Weights<type>::Value*>(block.matrix) + (block.first + r) * block.stride;
    const void* next = r + 2 * R <= block.count ? rows + R * block.stride : block.next;
    const auto some = [&](auto count, size_t m) {
        constexpr int M = decltype(count)::value;
        const bool ahead = next && m == 0;  // the rows then come from memory, later from the cache
        (ahead ? tile<type, R, M, true> : tile<type, R, M, false>)(
            block, rows, block.activations + m, block.out + m * block.out_stride + r, static_cast<const char*>(next));
    };
    for (size_t m = 0; m < block.tokens; m += most) switch (block.tokens - m) {
            case 1: some(Number<1>(), m); break;
            case 2: some(Number<2>(), m); break;
            case 3: some(Number<most < 3 ? most : 3>(), m); break;
            case 4: some(Number<most < 4 ? most : 4>(), m); break;
            case 5: some(Number<most < 5 ? most : 5>(), m); break;
            default: some(Number<most>(), m);
        }
}

template <Type type>
void multiply_rows(const Block& block) {
    size_t r = 0;
    if (block.tokens == 1)
        for (; r + single_rows <= block.count; r += single_rows) rows_by_tokens<type, single_rows>(block, r);
    for (; r + 4 <= block.count; r += 4) rows_by_tokens<type, 4>(block, r);
    for (; r < block.count; ++r) rows_by_tokens<type, 1>(block, r);
}

// Transposed: V columns at a time, U lines of the matrix at once, so that a sum is loaded and stored once in U steps.
// The lines of a column are taken in order, whatever U.
template <Type type, int U>
void add_lines(const Block& block, const typename Weights<type>::Value* lines, size_t k, bool ahead) {
    using W = Weights<type>;
    size_t c = 0;
    for (; c + V <= block.count; c += V) {
        F w[U];
        for (int u = 0; u < U; ++u) {
            w[u] = W::plain(lines + u * block.stride + c);
            if (ahead) fetch(reinterpret_cast<const char*>(lines + (U + u) * block.stride + c));
        }
        for (size_t m = 0; m < block.tokens; ++m) {
            const float* x = block.activations[m] + k;
            float* to = block.out + m * block.out_stride + c;
            F sum = Simd::load(to);
            for (int u = 0; u < U; ++u) sum = Simd::fma(w[u], Simd::all(x[u]), sum);
            Simd::store(to, sum);
        }
    }
    if (c == block.count) return;
    const size_t left = block.count - c;
    F w[U];
    for (int u = 0; u < U; ++u) {
        typename W::Value tail[V] = {};
        std::memcpy(tail, lines + u * block.stride + c, left * sizeof(*lines));
        w[u] = W::plain(tail);
    }
    for (size_t m = 0; m < block.tokens; ++m) {
        const float* x = block.activations[m] + k;
        float* to = block.out + m * block.out_stride + c;
        F sum = Simd::zero();
        std::memcpy(&sum, to, left * sizeof(float));
        for (int u = 0; u < U; ++u) sum = Simd::fma(w[u], Simd::all(x[u]), sum);
        std::memcpy(to, &sum, left * sizeof(float));
    }
}

template <Type type>
void multiply_columns(const Block& block) {
    using Value = typename Weights<type>::Value;
    const Value* lines = static_cast<const Value*>(block.matrix) + block.first;
    for (size_t m = 0; m < block.tokens; ++m)
        std::memset(block.out + m * block.out_stride, 0, block.count * sizeof(float));
    size_t k = 0;
    for (; k + 8 <= block.depth; k += 8)
        add_lines<type, 8>(block, lines + k * block.stride, k, k + 16 <= block.depth);
    for (; k < block.depth; ++k) add_lines<type, 1>(block, lines + k * block.stride, k, false);
}

template <Type type>
void multiply_as(const Block& block, bool transposed) {
    transposed ? multiply_columns<type>(block) : multiply_rows<type>(block);
}

void multiply(const Block& block, Type weights, bool transposed) {
    switch (weights) {
        case Type::float32: return multiply_as<Type::float32>(block, transposed);
        case Type::bfloat16: return multiply_as<Type::bfloat16>(block, transposed);
        case Type::float16: return multiply_as<Type::float16>(block, transposed);
    }
}

float read(const void* lines, size_t count) {
    const float* from = static_cast<const float*>(lines);
    F sums[8] = {};
    for (size_t line = 0; line + 8 <= count; line += 8)
        for (int s = 0; s < 8; ++s)
            for (int v = 0; v < 16; v += V) sums[s] += Simd::load(from + (line + s) * 16 + v);
    F sum = sums[0];
    for (int s = 1; s < 8; ++s) sum += sums[s];
    return Simd::sum(sum);
}

}  // namespace
}  // namespace overspill
