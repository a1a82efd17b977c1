#include "routed.hpp"

#include <algorithm>

namespace tandem {
namespace {

// Tokens per task when activations are converted.
constexpr std::int64_t kTaskTokens = 32;

}  // namespace

void ComingExperts::begin(const RoutedLayer& layer, const ExpertCall& call,
                          const std::vector<std::int32_t>& experts) {
  layer_ = layer;
  call_ = call;
  tokens_.clear();
  last_.clear();
  for (std::int64_t e = 0; e < call.num_experts; ++e) {
    const std::int32_t first = call.row_begin[e], end = call.row_begin[e + 1];
    tokens_.push_back(end - first);
    if (end > first && call.row_token[end - 1] == call.num_tokens - 1) last_.push_back(experts[e]);
  }
  layer.source->begin({layer.number, experts, tokens_, last_, call.num_tokens});
  is_under_way_ = true;
}

void ComingExperts::finish() {
  if (!is_under_way_) return;
  try {
    bool is_first = true;
    for (auto arrived = layer_.source->next(); !arrived.empty(); arrived = layer_.source->next()) {
      begin_.assign(1, 0);
      token_.clear();
      out_begin_.clear();
      addresses_.clear();
      for (const auto& [place, address, stays] : arrived) {
        const std::int32_t first = call_.row_begin[place], end = call_.row_begin[place + 1];
        token_.insert(token_.end(), call_.row_token + first, call_.row_token + end);
        begin_.push_back(static_cast<std::int32_t>(token_.size()));
        out_begin_.push_back(first);
        addresses_.push_back(address);
      }
      engine_.run(
          layer_.layout, layer_.activation,
          {static_cast<std::int64_t>(addresses_.size()), call_.num_tokens, addresses_.data(),
           begin_.data(), token_.data(), call_.hidden, call_.out, out_begin_.data(), !is_first});
      is_first = false;
    }
  } catch (...) {
    end();
    throw;
  }
  end();
}

void ComingExperts::end() noexcept {
  if (is_under_way_) layer_.source->end();
  is_under_way_ = false;
}

void RoutedExperts::each_part(std::int64_t num_tokens, const Part& part) {
  if (num_tokens <= 2 * kTaskTokens) return part(0, num_tokens);
  engine_.pool().run((num_tokens + kTaskTokens - 1) / kTaskTokens, [&](std::int64_t i) {
    part(i * kTaskTokens, std::min((i + 1) * kTaskTokens, num_tokens));
  });
}

// Counting sort by expert; an expert's tokens keep their order.
std::int64_t RoutedExperts::sort_rows(const RoutedLayer& layer, const RoutedCall& call) {
  const std::int64_t pairs = call.num_tokens * call.top_k;
  const auto is_valid = [&](std::int64_t e) { return e >= 0 && e < layer.num_experts; };
  count_.assign(layer.num_experts, 0);
  for (std::int64_t i = 0; i < pairs; ++i)
    if (is_valid(call.index[i])) ++count_[call.index[i]];
  active_.clear();
  addresses_.clear();
  begin_.assign(1, 0);
  for (std::int64_t e = 0; e < layer.num_experts; ++e) {
    if (count_[e] == 0) continue;
    active_.push_back(static_cast<std::int32_t>(e));
    addresses_.push_back(layer.expert(e));
    const std::int32_t first = begin_.back();
    begin_.push_back(first + count_[e]);
    count_[e] = first;  // from now on the index of the expert's next row
  }
  token_.resize(begin_.back());
  row_of_.resize(pairs);
  for (std::int64_t i = 0; i < pairs; ++i) {
    row_of_[i] = is_valid(call.index[i]) ? count_[call.index[i]]++ : -1;
    if (row_of_[i] >= 0) token_[row_of_[i]] = static_cast<std::int32_t>(i / call.top_k);
  }
  return static_cast<std::int64_t>(active_.size());
}

std::int64_t RoutedExperts::run(const RoutedLayer& layer, const RoutedCall& call) {
  engine_.wake();  // threads wake up while rows are sorted
  const std::int64_t size = layer.layout.hidden_size, values = call.num_tokens * size;
  const std::int64_t active = sort_rows(layer, call);
  hidden_.resize(std::max<std::size_t>(hidden_.size(), values));
  sums_.resize(std::max<std::size_t>(sums_.size(), values));
  weights_.resize(std::max<std::size_t>(weights_.size(), row_of_.size()));
  rows_.resize(std::max<std::size_t>(rows_.size(), token_.size() * size));
  each_part(call.num_tokens, [&](std::int64_t begin, std::int64_t end) {
    engine_.load(value_at(call.hidden, call.type, begin * size), call.type, (end - begin) * size,
                 hidden_.data() + begin * size);
  });
  engine_.load(call.weights, call.weight_type, call.num_tokens * call.top_k, weights_.data());
  const ExpertCall experts{active,        call.num_tokens, addresses_.data(), begin_.data(),
                           token_.data(), hidden_.data(),  rows_.data()};
  if (active > 0 && layer.source != nullptr) {
    coming_.begin(layer, experts, active_);
    layer.source->look_ahead(dense_,
                             {layer.number, hidden_.data(), size, call.num_tokens, call.top_k});
    coming_.finish();
  } else if (active > 0) {
    engine_.run(layer.layout, layer.activation, experts);
  }
  engine_.add_rows({call.num_tokens, call.top_k, size, rows_.data(), row_of_.data(),
                    weights_.data(), sums_.data()});
  each_part(call.num_tokens, [&](std::int64_t begin, std::int64_t end) {
    engine_.store(sums_.data() + begin * size, (end - begin) * size, call.type,
                  value_at(call.out, call.type, begin * size));
  });
  engine_.wake();  // threads wake up for the next layer's projections
  return active;
}

}  // namespace tandem
