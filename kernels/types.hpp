// What the scheduler and the instruction-set paths say to each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace overspill {

enum class Type { float32, bfloat16, float16 };

enum class Activation { silu, gelu, gelu_tanh, relu, relu2 };

inline size_t bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

// Of a block: their activations stay in the second-level cache while rows go by.
constexpr size_t most_tokens = 24;

// A run of rows of one expert's matrix (of columns, where it is stored transposed) against a few activations; with two
// halves, the gate's and the factor's, the same run of either.
struct Block {
    const void* matrix;               // [rows, depth], or transposed [depth, rows]
    size_t stride;                    // elements from one line of the matrix to the next
    size_t first, count;              // rows
    size_t halves, apart;             // how many, and rows from one to the next
    size_t depth;                     // elements that a product sums over
    const float* const* activations;  // `tokens` pointers, each to what Path::prepare wrote
    size_t tokens;
    float* out;                       // [halves, tokens, out_stride], `count` of each, padded to 16
    size_t out_stride, out_apart;     // floats from one token and from one half to the next
    const void* next;                 // what is read after this block and may be fetched ahead, or null
};

// One instruction set. Each product of a row and an activation is summed in an order that depends on `depth` alone,
// never on how many rows or tokens are computed beside it.
struct Path {
    const char* name;
    // Floats that `depth` prepared activations take.
    size_t (*prepared)(size_t depth);
    // Write `depth` values into the order in which `multiply` reads them, padded with zeros. Any multiple of 32 values
    // may also be prepared by itself.
    void (*prepare)(const void* values, Type type, size_t depth, Type weights, bool transposed, float* to);
    void (*multiply)(const Block& block, Type weights, bool transposed);
    // gate[i] = activation(gate[i]) * up[i]; without the factor where up is null. Both are padded to 16 floats.
    void (*activate)(Activation activation, float* gate, const float* up, size_t count);
    void (*widen)(const void* values, Type type, size_t count, float* to);
    void (*narrow)(const float* values, size_t count, Type type, void* to);
    // A sum over `count` 64-byte lines, for what memory gives at most; it only has to depend on every line.
    float (*read)(const void* lines, size_t count);
};

const Path& portable_path();
#ifdef OVERSPILL_X86
const Path& avx2_path();
const Path& avx512_path();
#endif

}  // namespace overspill
