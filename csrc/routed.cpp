#include "routed.hpp"

#include <algorithm>

namespace tandem {

// Counting sort by expert; a token keeps its place among the rows of an expert.
std::int64_t RoutedExperts::sort_rows(const RoutedLayer& layer, const RoutedCall& call) {
  const std::int64_t pairs = call.num_tokens * call.top_k;
  const auto is_valid = [&](std::int64_t e) { return e >= 0 && e < layer.num_experts; };
  count_.assign(layer.num_experts, 0);
  for (std::int64_t i = 0; i < pairs; ++i)
    if (is_valid(call.index[i])) ++count_[call.index[i]];
  addresses_.clear();
  begin_.assign(1, 0);
  for (std::int64_t e = 0; e < layer.num_experts; ++e) {
    if (count_[e] == 0) continue;
    addresses_.push_back(layer.experts + e * layer.expert_bytes);
    const std::int32_t first = begin_.back();
    begin_.push_back(first + count_[e]);
    count_[e] = first;  // from here on: the expert's next row
  }
  token_.resize(begin_.back());
  row_of_.resize(pairs);
  for (std::int64_t i = 0; i < pairs; ++i) {
    row_of_[i] = is_valid(call.index[i]) ? count_[call.index[i]]++ : -1;
    if (row_of_[i] >= 0) token_[row_of_[i]] = static_cast<std::int32_t>(i / call.top_k);
  }
  return static_cast<std::int64_t>(addresses_.size());
}

std::int64_t RoutedExperts::run(const RoutedLayer& layer, const RoutedCall& call) {
  engine_.wake();  // while the rows are sorted
  const std::int64_t size = layer.layout.hidden_size, values = call.num_tokens * size;
  const std::int64_t active = sort_rows(layer, call);
  hidden_.resize(std::max<std::size_t>(hidden_.size(), values));
  sums_.resize(std::max<std::size_t>(sums_.size(), values));
  weights_.resize(std::max<std::size_t>(weights_.size(), row_of_.size()));
  rows_.resize(std::max<std::size_t>(rows_.size(), token_.size() * size));
  engine_.load(call.hidden, call.type, values, hidden_.data());
  engine_.load(call.weights, call.weight_type, call.num_tokens * call.top_k, weights_.data());
  if (active > 0)
    engine_.run(layer.layout, layer.activation,
                {active, call.num_tokens, addresses_.data(), begin_.data(), token_.data(),
                 hidden_.data(), rows_.data()});
  engine_.add_rows({call.num_tokens, call.top_k, size, rows_.data(), row_of_.data(),
                    weights_.data(), sums_.data()});
  engine_.store(sums_.data(), values, call.type, call.out);
  engine_.wake();  // the next layer's projections come soon
  return active;
}

}  // namespace tandem
