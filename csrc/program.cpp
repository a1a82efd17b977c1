#include "program.hpp"

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
