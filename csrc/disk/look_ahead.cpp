#include "disk/look_ahead.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace tandem {
namespace {

// After this many tokens the mean hardly moves; older tokens fade.
constexpr std::int64_t kForgetAfter = 1 << 16;
// Tokens of a call to learn from.
constexpr std::int64_t kMostTokens = 32;

float scored(float value, AheadRouter::Scoring scoring) {
  switch (scoring) {
    case AheadRouter::Scoring::kSigmoid:
      return 1.0F / (1.0F + std::exp(-value));
    case AheadRouter::Scoring::kSqrtSoftplus:
      return std::sqrt(std::log1p(std::exp(value)));
    case AheadRouter::Scoring::kNone:
      break;
  }
  return value;
}

}  // namespace

LookAhead::LookAhead(std::vector<AheadRouter> routers, std::int64_t hidden_size)
    : routers_(std::move(routers)),
      hidden_size_(hidden_size),
      residuals_(routers_.size(), std::vector<float>(hidden_size, 0.0F)),
      num_learned_(routers_.size(), 0) {}

void LookAhead::learn(const RouterInputs& inputs) {
  const std::int64_t num_tokens = std::min(inputs.num_tokens, kMostTokens);
  const std::size_t size = num_tokens * hidden_size_;
  const float* values = inputs.values + (inputs.num_tokens - num_tokens) * hidden_size_;
  const std::int32_t before = inputs.layer - 1;
  const bool is_known = before >= 0 && before < static_cast<std::int32_t>(routers_.size());
  if (is_known && last_layer_ == before && last_.size() == size) {
    std::int64_t& num = num_learned_[before];
    float* residual = residuals_[before].data();
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      num = std::min(num + 1, kForgetAfter);
      const float share = 1.0F / static_cast<float>(num);
      const float* now = values + token * hidden_size_;
      const float* then = last_.data() + token * hidden_size_;
      for (std::int64_t i = 0; i < hidden_size_; ++i)
        residual[i] += share * (now[i] - then[i] - residual[i]);
    }
  }
  last_.assign(values, values + size);
  last_layer_ = inputs.layer;
}

Ids LookAhead::predict(DenseEngine& engine, const RouterInputs& inputs) {
  const auto next = static_cast<std::size_t>(inputs.layer) + 1;
  if (next >= routers_.size() || routers_[next].matrix == nullptr) return {};
  const AheadRouter& router = routers_[next];
  const float* residual = residuals_[inputs.layer].data();
  moved_.resize(inputs.num_tokens * hidden_size_);
  for (std::int64_t token = 0; token < inputs.num_tokens; ++token)
    for (std::int64_t i = 0; i < hidden_size_; ++i)
      moved_[token * hidden_size_ + i] = inputs.values[token * hidden_size_ + i] + residual[i];
  const std::int64_t num_experts = router.matrix->rows;
  scores_.resize(inputs.num_tokens * num_experts);
  void* out = scores_.data();
  engine.run(
      {1, &router.matrix, inputs.num_tokens, hidden_size_, ValueType::kFp32, moved_.data(), &out});
  Ids found;
  order_.resize(num_experts);
  const std::int64_t most = std::min(inputs.top_k, num_experts);
  for (std::int64_t token = 0; token < inputs.num_tokens; ++token) {
    float* scores = scores_.data() + token * num_experts;
    for (std::int64_t expert = 0; expert < num_experts; ++expert)
      scores[expert] = scored(scores[expert], router.scoring) +
                       (router.bias.empty() ? 0.0F : router.bias[expert]);
    std::iota(order_.begin(), order_.end(), 0);
    std::partial_sort(order_.begin(), order_.begin() + most, order_.end(),
                      [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
    found.insert(found.end(), order_.begin(), order_.begin() + most);
  }
  return found;
}

}  // namespace tandem
