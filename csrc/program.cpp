#include "program.hpp"

#include <algorithm>

namespace tandem {

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
  // A prompt's rows are worth all threads, a step's are not.
  constexpr std::int64_t kManyValues = 1 << 17;
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

void Program::operator()(const Dense& call) {
  dense_.run({static_cast<std::int64_t>(call.matrices.size()), call.matrices.data(),
              call.num_tokens, call.in_features, call.type, call.input, call.outputs.data()});
}

void Program::operator()(const Attention& call) {
  AttentionCall now = call.step;
  now.keys = call.layer->keys;
  now.values = call.layer->values;
  now.capacity_blocks = call.layer->capacity_blocks;
  attention_.append(now);
  attention_.run(now);
}

void Program::operator()(const Experts& call) {
  num_active_[call.number] = routed_.run(call.layer, call.call);
}

}  // namespace tandem
