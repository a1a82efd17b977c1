// Compares small tensor operations with plain loops, over random shapes, strides and types. Built
// with sanitizers; each buffer is exactly as large as necessary.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "half.hpp"
#include "program.hpp"
#include "random.hpp"
#include "tensor_ops.hpp"
#include "values.hpp"

namespace {

using tandem::ElementType;
using tandem::ElementwiseKind;
using tandem::Four;
using tandem::Operand;
using tandem::checks::Random;

constexpr int kRounds = 40;

std::int64_t count_of(const Four& sizes) {
  return sizes[0] * sizes[1] * sizes[2] * sizes[3];
}

// Contiguous fp32 or bf16 values, and the same in fp32.
struct Tensor {
  ElementType type;
  std::vector<std::uint8_t> bytes;
  std::vector<float> numbers;

  Tensor(Random& random, std::int64_t count, ElementType kind)
      : type(kind), bytes(count * tandem::element_bytes(kind)), numbers(random.normals(count)) {
    const auto value_type = static_cast<tandem::ValueType>(kind);
    tandem::store_values(numbers.data(), count, value_type, bytes.data());
    tandem::load_values(bytes.data(), value_type, count, numbers.data());
  }

  void read() {
    tandem::load_values(bytes.data(), static_cast<tandem::ValueType>(type),
                        static_cast<std::int64_t>(numbers.size()), numbers.data());
  }
};

ElementType any_type(Random& random) { return static_cast<ElementType>(random.between(0, 1)); }

Four any_sizes(Random& random, std::int64_t longest) {
  return {random.between(1, 3), random.between(1, 3), random.between(1, 5),
          random.between(1, longest)};
}

// Strides of a gapless tensor whose dimensions are in random memory order.
Four any_strides(Random& random, const Four& sizes) {
  Four order{0, 1, 2, 3}, strides{};
  for (int i = 3; i > 0; --i) std::swap(order[i], order[random.between(0, i)]);
  std::int64_t stride = 1;
  for (const std::int64_t dim : order) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  return strides;
}

Four dense_strides(const Four& sizes) {
  return {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
}

std::int64_t offset(const Four& strides, const Four& at) {
  return std::inner_product(at.begin(), at.end(), strides.begin(), std::int64_t{0});
}

template <typename Function>
void each(const Four& sizes, const Function& function) {
  for (std::int64_t a = 0; a < sizes[0]; ++a)
    for (std::int64_t b = 0; b < sizes[1]; ++b)
      for (std::int64_t c = 0; c < sizes[2]; ++c)
        for (std::int64_t d = 0; d < sizes[3]; ++d) function(Four{a, b, c, d});
}

bool is_near(float actual, float wanted, ElementType type) {
  const float tolerance = type == ElementType::kBf16 ? 1e-2f : 2e-5f;
  return std::fabs(actual - wanted) <= tolerance * std::max(1.0f, std::fabs(wanted));
}

struct Strided {
  Tensor tensor;
  Four strides;

  Strided(Random& random, const Four& sizes)
      : tensor(random, count_of(sizes), any_type(random)), strides(any_strides(random, sizes)) {}
  Operand operand() const { return {tensor.type, tensor.bytes.data(), strides, 0}; }
  float at(const Four& place) const { return tensor.numbers[offset(strides, place)]; }
};

bool elementwise_agrees(Random& random, const tandem::TensorKernels& kernels) {
  const Four sizes = any_sizes(random, 1500);
  const Strided a(random, sizes), b(random, sizes);
  Strided out(random, sizes);
  const Operand two{ElementType::kFp32, nullptr, {}, 2.0f};
  using Function = float (*)(float, float);
  const std::pair<ElementwiseKind, Function> kinds[] = {
      {ElementwiseKind::kCopy, [](float x, float) { return x; }},
      {ElementwiseKind::kSilu, [](float x, float) { return x / (1 + std::exp(-x)); }},
      {ElementwiseKind::kSigmoid, [](float x, float) { return 1 / (1 + std::exp(-x)); }},
      {ElementwiseKind::kGelu, [](float x, float) { return x * std::erfc(-x / 1.41421356f) / 2; }},
      {ElementwiseKind::kTanh, [](float x, float) { return std::tanh(x); }},
      {ElementwiseKind::kNegate, [](float x, float) { return -x; }},
      {ElementwiseKind::kAdd, [](float x, float y) { return x + y; }},
      {ElementwiseKind::kMultiply, [](float x, float y) { return x * y; }},
      {ElementwiseKind::kGreater, [](float x, float y) { return std::max(x, y); }},
      {ElementwiseKind::kIsLess, [](float x, float y) { return x < y ? 1.0f : 0.0f; }},
      {ElementwiseKind::kWhere, [](float x, float y) { return x != 0 ? y : 2.0f; }},
      {ElementwiseKind::kClamp, [](float x, float y) { return std::min(std::max(x, y), 2.0f); }},
  };
  for (const auto& [kind, function] : kinds) {
    kernels.combine({kind, sizes, a.operand(), b.operand(), two,
                     {out.tensor.type, out.tensor.bytes.data(), out.strides}});
    out.tensor.read();
    bool agrees = true;
    each(sizes, [&](const Four& at) {
      agrees &= is_near(out.at(at), function(a.at(at), b.at(at)), out.tensor.type);
    });
    if (!agrees) return false;
  }
  return true;
}

bool rows_agree(Random& random, const tandem::TensorKernels& kernels) {
  const Four sizes = any_sizes(random, 90);
  const std::int64_t n = sizes[3], rows = count_of(sizes) / n;
  const Strided x(random, sizes);
  const auto kind = static_cast<tandem::ReductionKind>(random.between(0, 4));
  Tensor reduced(random, rows, any_type(random));
  Tensor soft(random, rows * n, any_type(random)), normed(random, rows * n, any_type(random));
  const std::vector<float> weight = random.normals(n), bias = random.normals(n);
  std::vector<std::int64_t> index(rows);
  const bool has_index =
      kind == tandem::ReductionKind::kGreatest || kind == tandem::ReductionKind::kLeast;
  kernels.reduce({kind, sizes, x.operand(), reduced.type, reduced.bytes.data(),
                  has_index ? index.data() : nullptr});
  kernels.softmax({sizes, x.operand(), soft.type, soft.bytes.data()});
  kernels.layer_norm({sizes, x.operand(), 1e-2f, weight.data(), bias.data(), normed.type,
                      normed.bytes.data()});
  reduced.read();
  soft.read();
  normed.read();
  bool agrees = true;
  std::int64_t row = 0;
  each({sizes[0], sizes[1], sizes[2], 1}, [&](Four at) {
    std::vector<float> values;
    for (at[3] = 0; at[3] < n; ++at[3]) values.push_back(x.at(at));
    const auto count = static_cast<float>(n);
    const float sum = std::accumulate(values.begin(), values.end(), 0.0f), mean = sum / count;
    const auto [least, greatest] = std::minmax_element(values.begin(), values.end());
    const float squares = std::inner_product(values.begin(), values.end(), values.begin(), 0.0f);
    const float wanted[] = {sum, mean, *greatest, *least, std::sqrt(squares)};
    agrees &= is_near(reduced.numbers[row], wanted[static_cast<int>(kind)], reduced.type);
    if (has_index) agrees &= values[index[row]] == wanted[static_cast<int>(kind)];
    float total = 0, square = 0;
    for (const float value : values) {
      total += std::exp(value);
      square += (value - mean) * (value - mean);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      agrees &= is_near(soft.numbers[row * n + i], std::exp(values[i]) / total, soft.type);
      const float scaled = (values[i] - mean) / std::sqrt(square / count + 1e-2f);
      agrees &= is_near(normed.numbers[row * n + i], scaled * weight[i] + bias[i], normed.type);
    }
    ++row;
  });
  return agrees;
}

// Chooses the greatest, looks these values up by index, and writes them back to their positions.
bool places_agree(Random& random, const tandem::TensorKernels& kernels) {
  const Four sizes = any_sizes(random, 60);
  const std::int64_t n = sizes[3], rows = count_of(sizes) / n, k = random.between(1, n);
  const Strided x(random, sizes);
  const ElementType type = x.tensor.type;
  Tensor best(random, rows * k, type), found(random, rows * k, type);
  Tensor marked(random, rows * n, type);
  std::vector<std::int64_t> index(rows * k);
  kernels.find_greatest({sizes, x.operand(), k, type, best.bytes.data(), index.data()});
  best.read();
  Four few = sizes, strides = x.strides;
  few[3] = k;
  strides[3] = 0;
  const Four places = dense_strides(few);
  kernels.look_up({few, {type, x.tensor.bytes.data(), strides, 0},
                   {index.data(), places, n, x.strides[3]}, type, found.bytes.data()});
  found.read();
  if (found.numbers != best.numbers) return false;
  std::fill(marked.bytes.begin(), marked.bytes.end(), std::uint8_t{0});
  index[0] = random.between(0, 1) ? -1 : n;  // outside: nothing is written, and reads give NaN
  const Four whole = dense_strides(sizes);
  kernels.scatter({few, {type, best.bytes.data(), places, 0}, {index.data(), places, n, 1},
                   {type, marked.bytes.data(), {whole[0], whole[1], whole[2], 0}}});
  kernels.look_up({few, {type, x.tensor.bytes.data(), strides, 0},
                   {index.data(), places, n, x.strides[3]}, type, found.bytes.data()});
  marked.read();
  found.read();
  if (found.numbers[0] == found.numbers[0]) return false;
  for (std::int64_t i = 1; i < rows * k; ++i)
    if (marked.numbers[i / k * n + index[i]] != best.numbers[i]) return false;
  const auto written = std::count_if(marked.numbers.begin(), marked.numbers.end(),
                                     [](float value) { return value != 0; });
  const auto zeros = std::count(best.numbers.begin() + 1, best.numbers.end(), 0.0f);
  return written == rows * k - 1 - zeros;
}

bool product_agrees(Random& random, tandem::Program& program) {
  const Four sizes{random.between(1, 2), random.between(1, 3), random.between(1, 4),
                   random.between(1, 400)};
  const std::int64_t depth = random.between(1, 1300);
  const Strided a(random, {sizes[0], sizes[1], sizes[2], depth});
  Strided b(random, {sizes[0], sizes[1], depth, sizes[3]});
  if (random.between(0, 1))  // like a layer's weight
    b.strides = {sizes[1] * depth * sizes[3], depth * sizes[3], 1, depth};
  Strided out(random, sizes);
  program.add(tandem::Product{sizes, depth, a.operand(), b.operand(),
                              {out.tensor.type, out.tensor.bytes.data(), out.strides}});
  program.run();
  out.tensor.read();
  bool agrees = true;
  each(sizes, [&](const Four& at) {
    float wanted = 0;
    for (std::int64_t k = 0; k < depth; ++k)
      wanted += a.at({at[0], at[1], at[2], k}) * b.at({at[0], at[1], k, at[3]});
    const float rounding = out.tensor.type == ElementType::kBf16 ? 1e-2f * std::fabs(wanted) : 0;
    agrees &= std::fabs(out.at(at) - wanted) < 1e-3f + rounding;
  });
  return agrees;
}

// Compares with sorting all positions. Some keys are equal, so that the first must win.
bool selection_agrees(Random& random, tandem::Program& program) {
  const std::int64_t tokens = random.between(1, 3), heads = random.between(1, 40);
  const std::int64_t dim = random.between(1, 70), most = random.between(1, 9);
  const std::int64_t capacity = 600;
  const ElementType type = any_type(random);
  Tensor kept(random, tokens * capacity * dim, type);
  std::vector<float>& keys = kept.numbers;
  std::vector<std::int64_t> slots(tokens), positions(tokens);
  for (std::int64_t t = 0; t < tokens; ++t) {
    slots[t] = tokens - 1 - t;
    positions[t] = random.between(0, random.between(0, 1) ? 12 : capacity - 1);
    for (std::int64_t i = 3; i < 6; ++i)
      std::copy_n(keys.begin() + slots[t] * capacity * dim, dim,
                  keys.begin() + (slots[t] * capacity + i) * dim);
  }
  const auto value_type = static_cast<tandem::ValueType>(type);
  tandem::store_values(keys.data(), static_cast<std::int64_t>(keys.size()), value_type, kept.bytes.data());
  Tensor key(random, tokens * dim, any_type(random));
  const Tensor query(random, tokens * heads * dim, any_type(random));
  const Tensor weights(random, tokens * heads, ElementType::kFp32);
  const bool has_weights = random.between(0, 1) == 1;
  tandem::IndexLayer layer{value_type, kept.bytes.data(), capacity, dim};
  std::vector<std::int32_t> out(tokens * most);
  program.add(tandem::IndexSelection{
      &layer, {tokens, slots.data(), positions.data()}, heads, most, 0.5f,
      {key.type, key.bytes.data(), {0, 0, dim, 1}, 0},
      {query.type, query.bytes.data(), {0, heads * dim, dim, 1}, 0},
      {weights.type, has_weights ? weights.bytes.data() : nullptr, {0, 0, heads, 1}, 0},
      out.data()});
  program.run();
  kept.read();
  if (type == ElementType::kBf16 && key.type == ElementType::kFp32)  // it is stored in fewer bits
    for (float& value : key.numbers) value = tandem::bf16_to_float(tandem::float_to_bf16(value));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* own = keys.data() + slots[t] * capacity * dim;
    if (!std::equal(key.numbers.begin() + t * dim, key.numbers.begin() + (t + 1) * dim,
                    own + positions[t] * dim))
      return false;
    if (positions[t] < most) {
      if (out[t * most] != -1) return false;
      continue;
    }
    std::vector<double> scores(positions[t] + 1);
    for (std::int64_t p = 0; p <= positions[t]; ++p)
      for (std::int64_t h = 0; h < heads; ++h) {
        const float* q = query.numbers.data() + (t * heads + h) * dim;
        const double score = std::inner_product(q, q + dim, own + p * dim, 0.0) * 0.5;
        scores[p] += std::max(0.0, score) * (has_weights ? weights.numbers[t * heads + h] : 1);
      }
    std::vector<double> sorted(scores);
    std::sort(sorted.rbegin(), sorted.rend());
    for (std::int64_t k = 0; k < most; ++k) {
      const std::int32_t place = out[t * most + k];
      const bool is_sorted = k == 0 || place > out[t * most + k - 1];
      if (!is_sorted || scores[place] < sorted[most - 1] - 1e-3) return false;
    }
    const auto chosen = [&](std::int32_t place) {
      return std::find(out.begin() + t * most, out.begin() + (t + 1) * most, place) !=
             out.begin() + (t + 1) * most;
    };
    if (positions[t] > 5 && (chosen(4) > chosen(3) || chosen(5) > chosen(4))) return false;
  }
  return true;
}

// Compares the blocks that each head selects with their definition.
bool blocks_agree(Random& random, tandem::Program& program) {
  const std::int64_t heads = random.between(1, 40), dim = random.between(1, 70), capacity = 600;
  const std::int64_t block = random.between(1, 90), most = random.between(1, 5);
  const std::int64_t num_local = random.between(0, most), slot = 0;
  const std::int64_t position = random.between(0, capacity - 1);
  const ElementType type = any_type(random);
  Tensor kept(random, capacity * dim, type);
  const Tensor key(random, dim, type), query(random, heads * dim, any_type(random));
  std::vector<std::int32_t> out(heads * most);
  tandem::IndexLayer layer{static_cast<tandem::ValueType>(type), kept.bytes.data(), capacity, dim};
  program.add(tandem::IndexSelection{
      &layer, {1, &slot, &position}, heads, most, 0.5f, {key.type, key.bytes.data(), {0, 0, dim, 1}, 0},
      {query.type, query.bytes.data(), {0, heads * dim, dim, 1}, 0}, {}, out.data(), block, num_local});
  program.run();
  kept.read();
  const std::int64_t count = position / block + 1;
  for (std::int64_t h = 0; h < heads; ++h) {
    if (count <= most) {
      if (out[h * most] != -1) return false;
      continue;
    }
    std::vector<double> best(count, -1e30);
    const float* own = query.numbers.data() + h * dim;
    for (std::int64_t p = 0; p <= position; ++p) {
      const double score = std::inner_product(own, own + dim, kept.numbers.data() + p * dim, 0.0);
      best[p / block] = std::max(best[p / block], score);
    }
    std::fill(best.end() - num_local, best.end(), 1e30);
    std::vector<double> sorted(best);
    std::sort(sorted.rbegin(), sorted.rend());
    for (std::int64_t k = 0; k < most; ++k) {
      const std::int32_t number = out[h * most + k];
      if (number < 0 || (k > 0 && number <= out[h * most + k - 1])) return false;
      if (best[number] < sorted[most - 1] - 1e-3) return false;
    }
  }
  return true;
}

// Multiplies large tensors, which threads share, and writes the result over one of them.
bool many_agree(Random& random, tandem::Program& program) {
  const Four sizes{1, random.between(1, 5), random.between(1, 2), random.between(20000, 70000)};
  const Strided a(random, sizes), b(random, sizes);
  Tensor out = a.tensor;
  program.add(tandem::Elementwise{ElementwiseKind::kMultiply, sizes,
                                  {out.type, out.bytes.data(), a.strides, 0}, b.operand(), {},
                                  {out.type, out.bytes.data(), a.strides}});
  program.run();
  out.read();
  bool agrees = true;
  each(sizes, [&](const Four& at) {
    agrees &= is_near(out.numbers[offset(a.strides, at)], a.at(at) * b.at(at), out.type);
  });
  return agrees;
}

}  // namespace

int main() {
  Random random(97531);
  const auto isas = tandem::available_isas();
  for (int round = 0; round < kRounds; ++round) {
    const std::string& isa = isas[round % isas.size()];
    const tandem::TensorKernels& kernels = tandem::tensor_kernels(isa);
    tandem::ExpertEngine engine(static_cast<int>(random.between(1, 3)), isa);
    tandem::DenseEngine dense(engine);
    tandem::AttentionEngine attention(engine.pool(), engine.isa());
    tandem::RoutedExperts routed(engine);
    tandem::RecurrentEngine recurrent(engine.pool(), engine.isa());
    tandem::Program products(engine, dense, attention, routed, recurrent);
    tandem::Program many(engine, dense, attention, routed, recurrent);
    tandem::Program selections(engine, dense, attention, routed, recurrent);
    tandem::Program blocks(engine, dense, attention, routed, recurrent);
    const char* wrong = !elementwise_agrees(random, kernels) ? "an operation value by value"
                        : !rows_agree(random, kernels)       ? "an operation along a dimension"
                        : !places_agree(random, kernels)     ? "an operation by number"
                        : !product_agrees(random, products)  ? "a product"
                        : !selection_agrees(random, selections) ? "what an indexer selects"
                        : !blocks_agree(random, blocks) ? "what heads select"
                        : !many_agree(random, many)          ? "an operation on many values"
                                                             : nullptr;
    if (wrong != nullptr) {
      std::printf("round %d: %s differs with %s\n", round, wrong, isa.c_str());
      return 1;
    }
  }
  std::printf("%d rounds of small tensor operations agree\n", kRounds);
  return 0;
}
