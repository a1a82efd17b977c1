#include "program.hpp"

#include <algorithm>

namespace tandem {
namespace {

// With fewer values, one thread is faster. Prompts have more, decode steps do not.
constexpr std::int64_t kManyValues = 1 << 17;
// The same for operations that take several nanoseconds per value.
constexpr std::int64_t kManySlowValues = 1 << 14;

}  // namespace

std::int64_t Program::add(const RoutedLayer& layer, const RoutedCall& call) {
  const auto number = static_cast<std::int64_t>(num_active_.size());
  num_active_.push_back(0);
  steps_.emplace_back(Experts{layer, call, number});
  return number;
}

void Program::run() {
  const ThreadPool::Alert alert(pool_);
  for (const Step& step : steps_) std::visit([this](const auto& call) { (*this)(call); }, step);
}

void Program::operator()(const RmsNorm& call) {
  if (call.num_rows * call.cols < kManyValues) return rows_.norm(call);
  std::int64_t each = std::max<std::int64_t>(1, kManyValues / 8 / call.cols);
  each = (each + call.weight_rows - 1) / call.weight_rows * call.weight_rows;
  pool_.run((call.num_rows + each - 1) / each, [&](std::int64_t i) {
    RmsNorm part = call;
    const std::int64_t first = i * each;
    part.num_rows = std::min(each, call.num_rows - first);
    part.input = value_at(call.input, call.type, first * call.input_stride);
    part.gate = value_at(call.gate, call.type, first * call.gate_stride);
    part.out = value_at(call.out, call.type, first * call.cols);
    rows_.norm(part);
  });
}

void Program::operator()(const Rotary& call) {
  const std::int64_t values = call.num_heads * call.dim;  // per token
  if (call.num_tokens * values < kManyValues) return rows_.rotate(call);
  const std::int64_t each = std::max<std::int64_t>(1, kManyValues / 8 / values);
  pool_.run((call.num_tokens + each - 1) / each, [&](std::int64_t i) {
    Rotary part = call;
    const std::int64_t first = i * each;
    part.num_tokens = std::min(each, call.num_tokens - first);
    part.input = value_at(call.input, call.type, first * call.token_stride);
    part.cos = value_at(call.cos, call.type, first * call.rotated);
    part.sin = value_at(call.sin, call.type, first * call.rotated);
    part.out = value_at(call.out, call.type, first * values);
    rows_.rotate(part);
  });
}

void Program::operator()(const RotaryPairs& call) {
  const std::int64_t values = call.num_heads * call.dim;  // per token
  if (call.num_tokens * values < kManyValues) return rows_.rotate_pairs(call);
  const std::int64_t each = std::max<std::int64_t>(1, kManyValues / 8 / values);
  pool_.run((call.num_tokens + each - 1) / each, [&](std::int64_t i) {
    RotaryPairs part = call;
    const std::int64_t first = i * each;
    part.num_tokens = std::min(each, call.num_tokens - first);
    part.input = value_at(call.input, call.type, first * call.token_stride);
    part.turns = call.turns + first * call.turned;
    part.out = value_at(call.out, call.type, first * values);
    rows_.rotate_pairs(part);
  });
}

template <typename Call>
void Program::by_rows(const Call& call, void (*run)(const Call&)) {
  const Four& sizes = call.sizes;
  const std::int64_t total = sizes[0] * sizes[1] * sizes[2] * sizes[3];
  if (total < kManySlowValues) return run(call);
  const int dim = first_of_several(sizes);
  const std::int64_t each = std::max<std::int64_t>(1, sizes[dim] * (kManySlowValues / 8) / total);
  pool_.run((sizes[dim] + each - 1) / each, [&](std::int64_t i) {
    run(part_of(call, dim, i * each, std::min(each, sizes[dim] - i * each)));
  });
}

void Program::operator()(const Elementwise& call) {
  const Four& sizes = call.sizes;
  const std::int64_t total = sizes[0] * sizes[1] * sizes[2] * sizes[3];
  if (total < kManyValues) return tensors_.combine(call);
  const auto longest = std::max_element(sizes.begin(), sizes.end());
  const auto dim = static_cast<int>(longest - sizes.begin());
  const std::int64_t each = std::max<std::int64_t>(1, *longest * (kManyValues / 8) / total);
  pool_.run((*longest + each - 1) / each, [&](std::int64_t i) {
    tensors_.combine(part_of(call, dim, i * each, std::min(each, *longest - i * each)));
  });
}

void Program::operator()(const Product& call) {
  const std::int64_t columns = call.sizes[3];
  const std::int64_t total = call.sizes[0] * call.sizes[1] * columns * call.depth;  // values of `b`
  if (total < kManyValues) return tensors_.multiply(call);
  const std::int64_t each = std::max<std::int64_t>(1, columns * (kManyValues / 8) / total);
  pool_.run((columns + each - 1) / each, [&](std::int64_t i) {
    tensors_.multiply(part_of(call, i * each, std::min(each, columns - i * each)));
  });
}

void Program::operator()(const Dense& call) {
  dense_.run({static_cast<std::int64_t>(call.matrices.size()), call.matrices.data(),
              call.num_tokens, call.in_features, call.type, call.input, call.outputs.data(),
              call.token_stride, call.matrix_stride, call.out_stride});
}

void Program::operator()(const Attention& call) {
  AttentionCall now = call.step;
  now.keys = call.layer->keys;
  now.values = call.layer->values;
  now.capacity_blocks = call.layer->capacity_blocks;
  now.compressed.keys = call.layer->compressed.keys;
  now.compressed.capacity = call.layer->compressed.capacity;
  attention_.append(now);
  attention_.run(now);
}

void Program::operator()(const Experts& call) {
  num_active_[call.number] = routed_.run(call.layer, call.call);
}

}  // namespace tandem
