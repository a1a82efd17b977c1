// Compares the layers around the experts with plain loops, over random shapes: dense matrices,
// small row-wise operations, and experts that take the router's choice directly. Built with
// sanitizers; each buffer is exactly as large as necessary.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "dense.hpp"
#include "half.hpp"
#include "random.hpp"
#include "random_layers.hpp"
#include "routed.hpp"
#include "rowwise.hpp"

namespace {

using tandem::Format;
using tandem::ValueType;
using tandem::checks::Layer;
using tandem::checks::make_layer;
using tandem::checks::packed_bf16;
using tandem::checks::Random;
using tandem::checks::Values;

constexpr int kRounds = 150;

std::vector<float> read(const std::vector<std::uint8_t>& bytes, ValueType type) {
  std::vector<float> numbers(bytes.size() / tandem::value_bytes(type));
  tandem::load_values(bytes.data(), type, static_cast<std::int64_t>(numbers.size()),
                      numbers.data());
  return numbers;
}

ValueType any_type(Random& random) { return static_cast<ValueType>(random.between(0, 1)); }
ValueType any_token_type(Random& random) { return static_cast<ValueType>(random.between(0, 2)); }

// Conversions by every instruction set equal those of half.hpp bit by bit.
bool halves_agree(Random& random, const tandem::ExpertEngine& engine) {
  const std::int64_t count = random.between(0, 40);
  const Values halves(random.normals(count, random.between(0, 1) ? 1e-6f : 3e4f), ValueType::kFp16);
  std::vector<float> numbers(count);
  std::vector<std::uint8_t> bytes(halves.bytes.size());
  engine.load(halves.bytes.data(), ValueType::kFp16, count, numbers.data());
  engine.store(numbers.data(), count, ValueType::kFp16, bytes.data());
  return numbers == halves.numbers && bytes == halves.bytes;
}

bool is_near(const std::vector<float>& actual, const std::vector<float>& wanted, double limit) {
  double error = 0;
  double size = 1e-12;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    error += std::pow(double{actual[i]} - wanted[i], 2);
    size += std::pow(double{wanted[i]}, 2);
  }
  return std::sqrt(error / size) < limit;
}

bool dense_agrees(Random& random, tandem::ExpertEngine& engine) {
  const std::int64_t cols = 8 * random.between(1, 30), tokens = random.between(1, 40);
  const ValueType type = any_type(random);
  const Values input(random.normals(tokens * cols), type);
  std::vector<std::int64_t> rows;
  std::vector<std::vector<float>> weights;
  std::vector<std::vector<std::uint8_t>> data, outputs;
  for (std::int64_t m = random.between(1, 3); m > 0; --m) {
    rows.push_back(random.between(1, 90));
    weights.push_back(Values(random.normals(rows.back() * cols), ValueType::kBf16).numbers);
    data.push_back(packed_bf16(weights.back(), rows.back(), cols, cols));
    outputs.emplace_back(tokens * rows.back() * tandem::value_bytes(type));
  }
  std::vector<tandem::DenseMatrix> matrices;
  for (std::size_t m = 0; m < rows.size(); ++m)
    matrices.push_back({{Format::kBf16, (rows[m] + 15) / 16, cols, 0, data[m].data(), nullptr,
                         nullptr},
                        rows[m]});
  std::vector<const tandem::DenseMatrix*> pointers;
  std::vector<void*> targets;
  for (std::size_t m = 0; m < rows.size(); ++m) {
    pointers.push_back(&matrices[m]);
    targets.push_back(outputs[m].data());
  }
  tandem::DenseEngine(engine).run({static_cast<std::int64_t>(rows.size()), pointers.data(), tokens,
                                   cols, type, input.bytes.data(), targets.data()});
  for (std::size_t m = 0; m < rows.size(); ++m) {
    std::vector<float> wanted(tokens * rows[m]);
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t r = 0; r < rows[m]; ++r)
        wanted[t * rows[m] + r] =
            std::inner_product(weights[m].begin() + r * cols, weights[m].begin() + (r + 1) * cols,
                               input.numbers.begin() + t * cols, 0.0f);
    if (!is_near(read(outputs[m], type), wanted, 1e-2)) return false;
  }
  return true;
}

bool norm_agrees(Random& random, const std::string& isa) {
  const std::int64_t weight_rows = random.between(1, 2);
  const std::int64_t rows = weight_rows * random.between(1, 3), cols = random.between(1, 70);
  const ValueType type = any_type(random);
  const Values input(random.normals(rows * cols), type), gate(random.normals(rows * cols), type);
  const std::vector<float> weight = random.normals(weight_rows * cols);
  const auto kind = static_cast<tandem::GateKind>(random.between(0, 3));
  std::vector<std::uint8_t> out(input.bytes.size());
  tandem::row_kernels(isa).norm({rows, cols, 1e-6f, static_cast<tandem::NormRounding>(random.between(0, 2)), type,
                                 input.bytes.data(), cols, weight.data(), weight_rows, kind,
                                 gate.bytes.data(), cols, out.data()});
  std::vector<float> wanted(input.numbers);
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = wanted.data() + r * cols;
    std::vector<float> factor(gate.numbers.begin() + r * cols,
                              gate.numbers.begin() + (r + 1) * cols);
    for (float& g : factor)
      g = (kind == tandem::GateKind::kSigmoidAfter ? 1 : g) / (1 + std::exp(-g));
    for (std::int64_t c = 0; kind == tandem::GateKind::kSiluBefore && c < cols; ++c)
      row[c] *= factor[c];
    const float square = std::inner_product(row, row + cols, row, 0.0f);
    const bool is_gated_last = kind > tandem::GateKind::kSiluBefore;
    for (std::int64_t c = 0; c < cols; ++c)
      row[c] *= weight[r % weight_rows * cols + c] * (is_gated_last ? factor[c] : 1) /
                std::sqrt(square / static_cast<float>(cols) + 1e-6f);
  }
  return is_near(read(out, type), wanted, 1e-2);
}

bool rotary_agrees(Random& random, const std::string& isa) {
  const std::int64_t tokens = random.between(1, 4), heads = random.between(1, 3);
  const std::int64_t dim = 2 * random.between(1, 40), rotated = 2 * random.between(1, dim / 2);
  const ValueType type = any_type(random);
  const Values x(random.normals(tokens * heads * dim), type);
  const Values cos(random.normals(tokens * rotated), type);
  const Values sin(random.normals(tokens * rotated), type);
  std::vector<std::uint8_t> out(x.bytes.size());
  tandem::row_kernels(isa).rotate({tokens, heads, dim, rotated, type, x.bytes.data(), heads * dim, dim,
                  cos.bytes.data(), sin.bytes.data(), out.data()});
  std::vector<float> wanted(x.numbers);
  for (std::int64_t i = 0; i < tokens * heads; ++i)
    for (std::int64_t d = 0; d < rotated; ++d) {
      const std::int64_t angle = i / heads * rotated + d, half = rotated / 2;
      const float other =
          d < half ? -x.numbers[i * dim + d + half] : x.numbers[i * dim + d - half];
      wanted[i * dim + d] =
          x.numbers[i * dim + d] * cos.numbers[angle] + other * sin.numbers[angle];
    }
  return is_near(read(out, type), wanted, 2e-2);
}

bool pairs_agree(Random& random, const std::string& isa) {
  const std::int64_t tokens = random.between(1, 4), heads = random.between(1, 3);
  const std::int64_t dim = 2 * random.between(1, 40), turned = 2 * random.between(1, dim / 2);
  const ValueType type = any_type(random);
  const Values x(random.normals(tokens * heads * dim), type);
  const std::vector<float> turns = random.normals(tokens * turned);
  std::vector<std::uint8_t> out(x.bytes.size());
  tandem::row_kernels(isa).rotate_pairs({tokens, heads, dim, turned, type, x.bytes.data(), heads * dim, dim,
                                         turns.data(), out.data()});
  std::vector<float> wanted(x.numbers);
  for (std::int64_t i = 0; i < tokens * heads; ++i)
    for (std::int64_t d = 0; d < turned; d += 2) {
      const float* turn = turns.data() + i / heads * turned + d;
      const std::int64_t at = i * dim + dim - turned + d;
      const float real = x.numbers[at], imaginary = x.numbers[at + 1];
      wanted[at] = real * turn[0] - imaginary * turn[1];
      wanted[at + 1] = real * turn[1] + imaginary * turn[0];
    }
  return is_near(read(out, type), wanted, 2e-2);
}

// Compares with sorting all experts of the kept groups.
bool ranked_agrees(Random& random) {
  const std::int64_t tokens = random.between(1, 4), groups = random.between(1, 6);
  const std::int64_t size = random.between(1, 9), best = random.between(1, size);
  const std::int64_t kept = random.between(1, groups), experts = groups * size;
  const std::int64_t top_k = random.between(1, kept * size);
  const std::vector<float> scores = random.normals(tokens * experts);
  const std::vector<float> ranks = random.normals(tokens * experts);
  std::vector<float> weights(tokens * top_k);
  std::vector<std::int64_t> index(tokens * top_k);
  tandem::choose(tandem::RankedChoice{tokens, experts, top_k, groups, kept, best, false, 0.0f, 2.5f,
                                      ValueType::kFp32, scores.data(), ranks.data(),
                                      ValueType::kFp32, weights.data(), index.data()});
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* rank = ranks.data() + t * experts;
    std::vector<std::pair<float, std::int64_t>> sums, wanted;
    for (std::int64_t g = 0; g < groups; ++g) {
      std::vector<float> of_group(rank + g * size, rank + (g + 1) * size);
      std::sort(of_group.rbegin(), of_group.rend());
      sums.emplace_back(-std::accumulate(of_group.begin(), of_group.begin() + best, 0.0f), g);
    }
    std::sort(sums.begin(), sums.end());
    for (std::int64_t g = 0; g < kept; ++g)
      for (std::int64_t e = 0; e < size; ++e)
        wanted.emplace_back(-rank[sums[g].second * size + e], sums[g].second * size + e);
    std::sort(wanted.begin(), wanted.end());
    for (std::int64_t k = 0; k < top_k; ++k)
      if (index[t * top_k + k] != wanted[k].second ||
          weights[t * top_k + k] != 2.5f * scores[t * experts + wanted[k].second])
        return false;
  }
  return true;
}

bool choice_agrees(Random& random) {
  const std::int64_t tokens = random.between(1, 5), experts = random.between(1, 70);
  const std::int64_t top_k = random.between(1, std::min<std::int64_t>(8, experts));
  const Values logits(random.normals(tokens * experts), any_type(random));
  const ValueType type =
      logits.bytes.size() == logits.numbers.size() * 2 ? ValueType::kBf16 : ValueType::kFp32;
  std::vector<float> weights(tokens * top_k);
  std::vector<std::int64_t> index(tokens * top_k);
  constexpr float kScale = 2.5f;
  tandem::choose(tandem::Choice{tokens, experts, top_k, true, kScale, type, logits.bytes.data(), ValueType::kFp32,
                  weights.data(), index.data()});
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* row = logits.numbers.data() + t * experts;
    std::vector<std::int64_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int64_t a, std::int64_t b) { return row[a] > row[b]; });
    float total = 0;
    for (std::int64_t k = 0; k < top_k; ++k) total += std::exp(row[order[k]]);
    for (std::int64_t k = 0; k < top_k; ++k)
      if (index[t * top_k + k] != order[k] ||
          std::fabs(weights[t * top_k + k] - kScale * std::exp(row[order[k]]) / total) > 1e-5f)
        return false;
  }
  return true;
}

void add_expert(const Layer& l, std::int64_t expert, float weight, const float* x, float* out) {
  for (std::int64_t i = 0; i < l.inner; ++i) {
    const float* row = l.up[expert].data() + i * l.hidden;
    const float up = std::max(0.0f, std::inner_product(row, row + l.hidden, x, 0.0f));
    for (std::int64_t h = 0; h < l.hidden; ++h)
      out[h] += weight * up * up * l.down[expert][h * l.inner + i];
  }
}

bool routed_agrees(Random& random, tandem::ExpertEngine& engine) {
  const Layer l = make_layer(random, 8 * random.between(1, 12), random.between(1, 9));
  const std::int64_t tokens = random.between(1, 20), top_k = random.between(1, 4);
  const ValueType type = any_token_type(random), weight_type = any_token_type(random);
  const Values hidden(random.normals(tokens * l.hidden), type);
  const Values weights(random.normals(tokens * top_k), weight_type);
  std::vector<std::int64_t> index(tokens * top_k);
  for (std::int64_t& expert : index) expert = random.between(-1, l.count);  // both ends outside
  std::vector<std::uint8_t> out(hidden.bytes.size());
  tandem::RoutedExperts(engine).run(
      l.routed, {tokens, top_k, type, hidden.bytes.data(), index.data(), weight_type,
                 weights.bytes.data(), out.data()});
  std::vector<float> wanted(tokens * l.hidden);
  for (std::int64_t i = 0; i < tokens * top_k; ++i)
    if (index[i] >= 0 && index[i] < l.count)
      add_expert(l, index[i], weights.numbers[i], hidden.numbers.data() + i / top_k * l.hidden,
                 wanted.data() + i / top_k * l.hidden);
  return is_near(read(out, type), wanted, 2e-2);
}

}  // namespace

int main() {
  Random random(97531);
  for (int round = 0; round < kRounds; ++round) {
    const auto isas = tandem::available_isas();
    const std::string& isa = isas[round % isas.size()];
    tandem::ExpertEngine engine(static_cast<int>(random.between(1, 3)), isa);
    const char* wrong = !dense_agrees(random, engine)    ? "a dense matrix"
                        : !norm_agrees(random, isa)          ? "a norm"
                        : !rotary_agrees(random, isa)        ? "a rotary embedding"
                        : !pairs_agree(random, isa)          ? "a rotary embedding of pairs"
                        : !ranked_agrees(random)             ? "a choice by ranks"
                        : !choice_agrees(random)         ? "a router's choice"
                        : !halves_agree(random, engine)  ? "fp16"
                        : !routed_agrees(random, engine) ? "a routed layer"
                                                          : nullptr;
    if (wrong != nullptr) {
      std::printf("round %d: %s differs with %s\n", round, wrong, isa.c_str());
      return 1;
    }
  }
  std::printf("%d rounds of dense matrices, rows and routed layers agree\n", kRounds);
  return 0;
}
