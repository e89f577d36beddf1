// Products with columns, of a matrix whose lines lie across the depth.
#pragma once

#include "weights.hpp"

namespace overspill {
namespace {

// Adds U lines of the matrix, from `k` on, to the sums at `out`: V columns at a time, so that a sum is loaded and stored
// once for U products. A column takes its lines in order, whatever U.
template <Type type, int U>
void add_lines(const Block& block, const typename Weights<type>::Value* lines, float* out, size_t k, bool ahead) {
    using W = Weights<type>;
    using Value = typename W::Value;
    F first[U];  // what the first token multiplies the lines with; the compiler cannot keep it over the stores itself
    OVERSPILL_UNROLL for (int u = 0; u < U; ++u) first[u] = Simd::all(block.activations[0][k + u]);
    for (size_t c = 0; c < block.count; c += V) {
        F w[U];
        if (c + V <= block.count) {
            const bool new_line = ahead && c % (64 / sizeof(Value)) == 0;
            OVERSPILL_UNROLL for (int u = 0; u < U; ++u) {
                w[u] = W::plain(lines + u * block.stride + c);
                if (new_line) fetch(reinterpret_cast<const char*>(lines + (U + u) * block.stride + c));
            }
        } else {
            OVERSPILL_UNROLL for (int u = 0; u < U; ++u) {
                Value tail[V] = {};
                std::memcpy(tail, lines + u * block.stride + c, (block.count - c) * sizeof(Value));
                w[u] = W::plain(tail);
            }
        }
        F sum = Simd::load(out + c);
        OVERSPILL_UNROLL for (int u = 0; u < U; ++u) sum = Simd::fma(w[u], first[u], sum);
        Simd::store(out + c, sum);
        for (size_t m = 1; m < block.tokens; ++m) {
            const float* x = block.activations[m] + k;
            float* to = out + m * block.out_stride + c;
            sum = Simd::load(to);
            OVERSPILL_UNROLL for (int u = 0; u < U; ++u) sum = Simd::fma(w[u], Simd::all(x[u]), sum);
            Simd::store(to, sum);
        }
    }
}

// U lines at a time from `k` on, and all of a line before the next: what lies between the halves would be fetched in
// vain. Gives the line at which fewer than U are left.
template <Type type, int U>
size_t add_all(const Block& block, size_t k) {
    const auto* matrix = static_cast<const typename Weights<type>::Value*>(block.matrix) + block.first;
    for (; k + U <= block.depth; k += U)
        for (size_t half = 0; half < block.halves; ++half)
            add_lines<type, U>(block, matrix + k * block.stride + half * block.apart,
                               block.out + half * block.out_apart, k, k + 2 * U <= block.depth);
    return k;
}

template <Type type>
void multiply_columns(const Block& block) {
    const size_t padded = (block.count + V - 1) / V * V;
    for (size_t half = 0; half < block.halves; ++half)
        for (size_t m = 0; m < block.tokens; ++m)
            std::memset(block.out + half * block.out_apart + m * block.out_stride, 0, padded * sizeof(float));
    // For few tokens memory is the limit, and fewer lines fetched ahead stay in the first-level cache.
    const size_t k = block.tokens <= 2 ? add_all<type, 4>(block, 0) : add_all<type, 8>(block, 0);
    add_all<type, 1>(block, k);
}

}  // namespace
}  // namespace overspill
