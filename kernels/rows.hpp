// Products with rows that lie along the depth: tiles of dot products.
#pragma once

#include "weights.hpp"

namespace overspill {
namespace {

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

// The tile of R rows from `r` on and M tokens from `m` on.
template <Type type, int R, int M>
void one_tile(const Block& block, size_t r, size_t m) {
    const auto* rows = static_cast<const typename Weights<type>::Value*>(block.matrix) + (block.first + r) * block.stride;
    const void* next = r + 2 * R <= block.count ? rows + R * block.stride : block.next;
    const bool ahead = next && m == 0;  // for the first tokens the rows come from memory, then from the cache
    (ahead ? tile<type, R, M, true> : tile<type, R, M, false>)(
        block, rows, block.activations + m, block.out + m * block.out_stride + r, static_cast<const char*>(next));
}

template <Type type, int R>
void rows_by_tokens(const Block& block, size_t r) {
    constexpr size_t most = Simd::tokens;
    for (size_t m = 0; m < block.tokens; m += most) switch (block.tokens - m) {
            case 1: one_tile<type, R, 1>(block, r, m); break;
            case 2: one_tile<type, R, 2>(block, r, m); break;
            case 3: one_tile<type, R, most < 3 ? most : 3>(block, r, m); break;
            case 4: one_tile<type, R, most < 4 ? most : 4>(block, r, m); break;
            case 5: one_tile<type, R, most < 5 ? most : 5>(block, r, m); break;
            default: one_tile<type, R, most>(block, r, m);
        }
}

template <Type type>
void multiply_rows(const Block& block) {
    size_t r = 0;
    if (block.tokens == 1)
        for (; r + 8 <= block.count; r += 8) one_tile<type, 8, 1>(block, r, 0);
    for (; r + 4 <= block.count; r += 4) rows_by_tokens<type, 4>(block, r);
    for (; r < block.count; ++r)
        for (size_t m = 0; m < block.tokens; ++m) one_tile<type, 1, 1>(block, r, m);
}

template <Type type>
void multiply_halves(const Block& block) {
    for (size_t half = 0; half < block.halves; ++half) {
        Block one = block;
        one.first += half * block.apart;
        one.out += half * block.out_apart;
        if (half + 1 < block.halves)
            one.next = static_cast<const typename Weights<type>::Value*>(block.matrix) +
                       (one.first + block.apart) * block.stride;
        multiply_rows<type>(one);
    }
}

}  // namespace
}  // namespace overspill
