// One block of routed experts over a few tokens: what is computed, and on what.
#pragma once

#include "types.hpp"

namespace overspill {

// The weights of E experts, as they lie. Rows of `up` are [gate; up] where gated. Nothing is owned.
struct Experts {
    const void* up;         // [E, G, H], transposed [E, H, G], with G = 2 I where gated, else I
    const void* down;       // [E, H, I], transposed [E, I, H]
    const void* up_bias;    // [E, G] or null
    const void* down_bias;  // [E, H] or null
    Type type;
    size_t count, hidden, intermediate;
    bool gated, transposed;

    size_t up_rows() const { return gated ? 2 * intermediate : intermediate; }
};

// The experts chosen for T tokens. One outside [0, E) stands for none.
struct Choices {
    const int64_t* index;  // [T, K]
    const float* weights;  // [T, K]
    size_t tokens, each;
};

// out[t] = sum over t's experts of weight * (down (activation(gate) * up)); hidden and out are [T, H] of `type`. A sum
// takes its experts in ascending order.
void compute(const Path& path, const Experts& experts, Activation activation, const Choices& choices,
             const void* hidden, void* out, Type type, int threads);

// The same in two halves, for gates that are computed elsewhere. Pairs of a token and an expert are in ascending order
// of the expert, then of the token, then of the place among the token's choices.
void compute_up(const Path& path, const Experts& experts, const Choices& choices, const void* hidden, Type type,
                float* products /* [pairs, G] */, int threads);
void compute_down(const Path& path, const Experts& experts, const Choices& choices, const float* gated /* [pairs, I] */,
                  void* out, Type type, int threads);

// Reads whole cache lines with `threads` threads, as fast as memory gives them.
float read_memory(const Path& path, const void* address, size_t bytes, int threads);

}  // namespace overspill
