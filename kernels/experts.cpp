#include "experts.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "pool.hpp"

namespace overspill {
namespace {

constexpr size_t row_unit = 32;    // rows of a task come in whole units: Path::prepare's
constexpr size_t most_rows = 256;  // of a task
constexpr size_t widest = 1024;    // of a task on a transposed matrix that few tokens are multiplied with
constexpr size_t buffer_floats = most_tokens * most_rows;

struct Pair {
    size_t token;
    float weight;
};

struct Chosen {
    size_t expert;
    size_t first, pairs;
};

const char* at(const void* base, size_t element, Type type) {
    return static_cast<const char*>(base) + element * bytes_of(type);
}

// Enough tasks that threads which are held up do not hold up the rest. A transposed matrix is read line by line in
// pieces as wide as a task, so few wide ones are better there.
size_t rows_of_task(size_t rows, bool transposed, bool few_tokens, int threads) {
    const size_t shared = rows / (threads * (transposed ? 2 : 32));
    return std::clamp(shared / row_unit * row_unit, row_unit, transposed && few_tokens ? widest : most_rows);
}

size_t parts(size_t whole, size_t part) { return (whole + part - 1) / part; }

class Run final : public Work {
  public:
    Run(const Path& path, const Experts& experts, const Choices& choices, int threads, Pool& pool)
        : path_(path), experts_(experts), choices_(choices), threads_(threads), pool_(pool) {
        sort_pairs();
    }

    // Each adds its phases.
    void add_up(const void* hidden, Type type, std::optional<Activation> activation, float* products);
    void add_gated(const float* gated);
    void add_down(void* out, Type type);

    void run(int phase, size_t task) override { (this->*steps_[phase])(task); }

  private:
    using Step = void (Run::*)(size_t task);

    void add(Step step, size_t count) {
        steps_[phases] = step;
        tasks[phases++] = count;
    }
    bool few_tokens() const { return pairs_.size() <= 2 * chosen_.size(); }
    void sort_pairs();
    void take_inner();
    void prepare_hidden(size_t token);
    void prepare_gated(size_t pair);
    void up(size_t task);
    void down(size_t task);

    const Path& path_;
    const Experts& experts_;
    const Choices& choices_;
    const int threads_;
    Pool& pool_;
    Step steps_[most_phases] = {};

    std::vector<Pair> pairs_;     // in ascending order of the expert, then as they were chosen
    std::vector<Chosen> chosen_;  // experts with pairs

    Type type_ = Type::float32;  // of hidden states and out
    const void* hidden_ = nullptr;
    const float* gated_ = nullptr;
    void* out_ = nullptr;
    std::optional<Activation> activation_;

    size_t up_part_ = 0, down_part_ = 0;  // rows of a task
    float* prepared_ = nullptr;           // [T, prepared(H)]
    float* inner_ = nullptr;              // [pairs, prepared(I)], what `down` multiplies
    float* products_ = nullptr;           // [pairs, G], where the caller computes the gate
    float* sums_ = nullptr;               // [T, H]
    std::vector<const float*> up_operands_, down_operands_;  // of each pair
};

void Run::sort_pairs() {
    const size_t all = choices_.tokens * choices_.each;
    const auto expert_of = [&](size_t i) { return static_cast<uint64_t>(choices_.index[i]); };
    std::vector<size_t> next(experts_.count);
    for (size_t i = 0; i < all; ++i)
        if (expert_of(i) < experts_.count) ++next[expert_of(i)];
    size_t pairs = 0;
    for (size_t e = 0; e < experts_.count; ++e) {
        if (next[e]) chosen_.push_back({e, pairs, next[e]});
        const size_t first = pairs;
        pairs += next[e];
        next[e] = first;
    }
    pairs_.resize(pairs);
    for (size_t i = 0; i < all; ++i)
        if (expert_of(i) < experts_.count)
            pairs_[next[expert_of(i)]++] = {i / choices_.each, choices_.weights ? choices_.weights[i] : 0};
}

void Run::take_inner() {
    const size_t stride = path_.prepared(experts_.intermediate);
    inner_ = pool_.inner.take(pairs_.size() * stride);
    for (size_t p = 0; p < pairs_.size(); ++p) down_operands_.push_back(inner_ + p * stride);
}

void Run::add_up(const void* hidden, Type type, std::optional<Activation> activation, float* products) {
    hidden_ = hidden;
    type_ = type;
    activation_ = activation;
    products_ = products;
    const size_t stride = path_.prepared(experts_.hidden);
    prepared_ = pool_.prepared.take(choices_.tokens * stride);
    for (const Pair& pair : pairs_) up_operands_.push_back(prepared_ + pair.token * stride);
    if (activation) take_inner();
    up_part_ = rows_of_task(experts_.intermediate * chosen_.size(), experts_.transposed, few_tokens(), threads_);
    add(&Run::prepare_hidden, choices_.tokens);
    add(&Run::up, chosen_.size() * parts(experts_.intermediate, up_part_));
}

void Run::add_gated(const float* gated) {
    gated_ = gated;
    take_inner();
    add(&Run::prepare_gated, pairs_.size());
}

void Run::add_down(void* out, Type type) {
    type_ = type;
    out_ = out;
    const size_t hidden = experts_.hidden;
    sums_ = type == Type::float32 ? static_cast<float*>(out) : pool_.sums.take(choices_.tokens * hidden);
    down_part_ = rows_of_task(hidden, experts_.transposed, few_tokens(), threads_);
    add(&Run::down, parts(hidden, down_part_));
}

void Run::prepare_hidden(size_t token) {
    path_.prepare(at(hidden_, token * experts_.hidden, type_), type_, experts_.hidden, experts_.type,
                  experts_.transposed, prepared_ + token * path_.prepared(experts_.hidden));
}

void Run::prepare_gated(size_t pair) {
    path_.prepare(gated_ + pair * experts_.intermediate, Type::float32, experts_.intermediate, experts_.type,
                  experts_.transposed, inner_ + pair * path_.prepared(experts_.intermediate));
}

void add_to_each(float* values, size_t lines, size_t stride, const float* bias, size_t count) {
    for (size_t line = 0; line < lines; ++line)
        for (size_t i = 0; i < count; ++i) values[line * stride + i] += bias[i];
}

// One expert's products for some of its inner rows, and what the gate makes of them.
void Run::up(size_t task) {
    const size_t a_part = parts(experts_.intermediate, up_part_);
    const Chosen& chosen = chosen_[task / a_part];
    const size_t first = task % a_part * up_part_, count = std::min(up_part_, experts_.intermediate - first);
    const size_t rows = experts_.up_rows(), halves = experts_.gated ? 2 : 1;
    const void* matrix = at(experts_.up, chosen.expert * rows * experts_.hidden, experts_.type);
    alignas(64) float values[2][buffer_floats];
    alignas(64) float bias[2][widest];
    const size_t most = std::min(most_tokens, buffer_floats / up_part_);
    for (size_t half = 0; half < halves && experts_.up_bias; ++half)
        path_.widen(at(experts_.up_bias, chosen.expert * rows + half * experts_.intermediate + first, experts_.type),
                    experts_.type, count, bias[half]);
    for (size_t p = chosen.first; p < chosen.first + chosen.pairs; p += most) {
        const size_t tokens = std::min(most, chosen.first + chosen.pairs - p);
        path_.multiply({matrix, experts_.transposed ? rows : experts_.hidden, first, count, halves,
                        experts_.intermediate, experts_.hidden, &up_operands_[p], tokens, values[0], up_part_,
                        buffer_floats, nullptr},
                       experts_.type, experts_.transposed);
        for (size_t half = 0; half < halves && experts_.up_bias; ++half)
            add_to_each(values[half], tokens, up_part_, bias[half], count);
        for (size_t t = 0; t < tokens; ++t) {
            float* gate = values[0] + t * up_part_;
            float* factor = halves == 2 ? values[1] + t * up_part_ : nullptr;
            if (!activation_) {
                float* to = products_ + (p + t) * rows + first;
                std::memcpy(to, gate, count * sizeof(float));
                if (factor) std::memcpy(to + experts_.intermediate, factor, count * sizeof(float));
                continue;
            }
            path_.activate(*activation_, gate, factor, count);
            path_.prepare(gate, Type::float32, count, experts_.type, experts_.transposed,
                          inner_ + (p + t) * path_.prepared(experts_.intermediate) + first);
        }
    }
}

// Some rows of every token's output, over all experts in turn.
void Run::down(size_t task) {
    const size_t hidden = experts_.hidden, inner = experts_.intermediate;
    const size_t first = task * down_part_, count = std::min(down_part_, hidden - first);
    for (size_t t = 0; t < choices_.tokens; ++t) std::memset(sums_ + t * hidden + first, 0, count * sizeof(float));

    const auto matrix_of = [&](const Chosen& chosen) {
        return at(experts_.down, chosen.expert * hidden * inner, experts_.type);
    };
    alignas(64) float values[buffer_floats];
    alignas(64) float bias[widest];
    const size_t most = std::min(most_tokens, buffer_floats / down_part_);
    for (size_t c = 0; c < chosen_.size(); ++c) {
        const Chosen& chosen = chosen_[c];
        const void* following =
            c + 1 < chosen_.size() ? at(matrix_of(chosen_[c + 1]), first * inner, experts_.type) : nullptr;
        if (experts_.down_bias)
            path_.widen(at(experts_.down_bias, chosen.expert * hidden + first, experts_.type), experts_.type, count, bias);
        for (size_t p = chosen.first; p < chosen.first + chosen.pairs; p += most) {
            const size_t tokens = std::min(most, chosen.first + chosen.pairs - p);
            path_.multiply({matrix_of(chosen), experts_.transposed ? hidden : inner, first, count, 1, 0, inner,
                            &down_operands_[p], tokens, values, down_part_, 0,
                            p == chosen.first ? following : nullptr},
                           experts_.type, experts_.transposed);
            if (experts_.down_bias) add_to_each(values, tokens, down_part_, bias, count);
            for (size_t t = 0; t < tokens; ++t) {
                const Pair& pair = pairs_[p + t];
                float* sum = sums_ + pair.token * hidden + first;
                for (size_t i = 0; i < count; ++i) sum[i] += pair.weight * values[t * down_part_ + i];
            }
        }
    }
    if (type_ == Type::float32) return;
    for (size_t t = 0; t < choices_.tokens; ++t) {
        const size_t place = t * hidden + first;
        path_.narrow(sums_ + place, count, type_, static_cast<char*>(out_) + place * bytes_of(type_));
    }
}

}  // namespace

void compute(const Path& path, const Experts& experts, Activation activation, const Choices& choices,
             const void* hidden, void* out, Type type, int threads) {
    Pool& pool = Pool::of_process();
    const std::lock_guard lock(pool.calls);
    Run run(path, experts, choices, threads, pool);
    run.add_up(hidden, type, activation, nullptr);
    run.add_down(out, type);
    pool.run(run, threads);
}

void compute_up(const Path& path, const Experts& experts, const Choices& choices, const void* hidden, Type type,
                float* products, int threads) {
    Pool& pool = Pool::of_process();
    const std::lock_guard lock(pool.calls);
    Run run(path, experts, choices, threads, pool);
    run.add_up(hidden, type, std::nullopt, products);
    pool.run(run, threads);
}

void compute_down(const Path& path, const Experts& experts, const Choices& choices, const float* gated, void* out,
                  Type type, int threads) {
    Pool& pool = Pool::of_process();
    const std::lock_guard lock(pool.calls);
    Run run(path, experts, choices, threads, pool);
    run.add_gated(gated);
    run.add_down(out, type);
    pool.run(run, threads);
}

}  // namespace overspill
