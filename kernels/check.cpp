// Every instruction set over ragged shapes, in memory that ends where the operands do, against float64. Built with
// sanitizers (`make sanitize`), where a read past the end of a row ends the program.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "experts.hpp"
#include "paths.hpp"

using namespace overspill;

namespace {

std::mt19937 random_bits(1);

// Values of a type, and what they are.
struct Values {
    explicit Values(size_t count, Type type) : type(type), exact(count), lying(new char[count * bytes_of(type)]) {
        std::normal_distribution<float> normal;
        std::vector<float> values(count + 1);
        for (float& value : values) value = normal(random_bits);
        portable_path().narrow(values.data(), count, type, lying.get());
        portable_path().widen(lying.get(), type, count, values.data());
        for (size_t i = 0; i < count; ++i) exact[i] = values[i];
    }

    Type type;
    std::vector<double> exact;
    std::unique_ptr<char[]> lying;
};

struct Shape {
    size_t tokens, each, experts, hidden, intermediate;
    bool gated, transposed, biased;
    Type weights, states;
};

double worst_error(const Path& path, const Shape& s, int threads) {
    const size_t rows = s.gated ? 2 * s.intermediate : s.intermediate, E = s.experts, H = s.hidden, I = s.intermediate;
    const Values up(E * rows * H, s.weights), down(E * H * I, s.weights), up_bias(E * rows, s.weights),
        down_bias(E * H, s.weights), hidden(s.tokens * H, s.states), weights(s.tokens * s.each, Type::float32);
    std::vector<int64_t> index(s.tokens * s.each);
    for (int64_t& expert : index) expert = static_cast<int64_t>(random_bits() % (E + 1)) - (random_bits() % 5 == 0);

    const std::unique_ptr<char[]> out(new char[s.tokens * H * bytes_of(s.states)]);
    const Experts experts{up.lying.get(), down.lying.get(), s.biased ? up_bias.lying.get() : nullptr,
                          s.biased ? down_bias.lying.get() : nullptr, s.weights, E, H, I, s.gated, s.transposed};
    const Choices choices{index.data(), reinterpret_cast<const float*>(weights.lying.get()), s.tokens, s.each};
    compute(path, experts, Activation::relu, choices, hidden.lying.get(), out.get(), s.states, threads);
    std::vector<float> found(s.tokens * H);
    portable_path().widen(out.get(), s.states, found.size(), found.data());

    const auto element = [&](const Values& matrix, size_t e, size_t lines, size_t depth, size_t row, size_t k) {
        return matrix.exact[e * lines * depth + (s.transposed ? k * lines + row : row * depth + k)];
    };
    double worst = 0, largest = 1;
    for (size_t t = 0; t < s.tokens; ++t) {
        std::vector<double> expected(H);
        for (size_t k = 0; k < s.each; ++k) {
            const auto e = static_cast<uint64_t>(index[t * s.each + k]);
            if (e >= E) continue;
            std::vector<double> products(rows);
            for (size_t row = 0; row < rows; ++row) {
                products[row] = s.biased ? up_bias.exact[e * rows + row] : 0;
                for (size_t h = 0; h < H; ++h) products[row] += element(up, e, rows, H, row, h) * hidden.exact[t * H + h];
            }
            for (size_t h = 0; h < H; ++h) {
                double sum = s.biased ? down_bias.exact[e * H + h] : 0;
                for (size_t i = 0; i < I; ++i)
                    sum += element(down, e, H, I, h, i) * std::fmax(products[i], 0) * (s.gated ? products[I + i] : 1);
                expected[h] += weights.exact[t * s.each + k] * sum;
            }
        }
        for (size_t h = 0; h < H; ++h) {
            worst = std::fmax(worst, std::fabs(found[t * H + h] - expected[h]));
            largest = std::fmax(largest, std::fabs(expected[h]));
        }
    }
    return worst / largest;
}

size_t any_of(std::initializer_list<size_t> sizes) { return sizes.begin()[random_bits() % sizes.size()]; }

}  // namespace

int main() {
    constexpr Type types[] = {Type::float32, Type::bfloat16, Type::float16};
    constexpr double most[] = {1e-5, 8e-3, 1e-3};
    int shapes = 0;
    for (const char* name : path_names) {
        const Path* path = path_named(name);
        if (!path) {
            std::printf("%s: not on this processor\n", name);
            continue;
        }
        for (int round = 0; round < 150; ++round, ++shapes) {
            const Shape shape{any_of({0, 1, 2, 3, 5, 6, 7, 13, 27}), any_of({1, 2, 4}), any_of({1, 2, 5}),
                              any_of({1, 7, 16, 31, 33, 65, 130}), any_of({1, 8, 15, 32, 47, 70}), round % 2 == 0,
                              round % 4 < 2, round % 3 == 0, types[random_bits() % 3], types[random_bits() % 3]};
            const double error = worst_error(*path, shape, 1 + round % 3);
            if (!(error <= most[static_cast<int>(shape.states)])) {
                std::printf("%s, round %d: off by %g\n", name, round, error);
                return 1;
            }
        }
    }
    std::printf("%d shapes\n", shapes);
    return 0;
}
