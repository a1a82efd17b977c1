#include "coordinator/row_experts.hpp"

#include <algorithm>

#include "coordinator/words.hpp"

namespace tandem {

// Groups tokens by expert; within an expert they keep their order.
void RowExperts::sort(const RowCall& call) {
  order_.clear();
  for (std::int64_t i = 0; i < call.num_tokens * call.top_k; ++i)
    if (call.experts[i] != nullptr) order_.push_back(static_cast<std::int32_t>(i));
  if (call.num_tokens > 1)
    std::stable_sort(order_.begin(), order_.end(), [&](std::int32_t a, std::int32_t b) {
      return call.experts[a] < call.experts[b];
    });
  addresses_.clear();
  begin_.clear();
  token_.clear();
  for (const std::int32_t row : order_) {
    const std::uint8_t* expert = call.experts[row];
    if (call.num_tokens == 1 || addresses_.empty() || addresses_.back() != expert) {
      addresses_.push_back(expert);
      begin_.push_back(static_cast<std::int32_t>(token_.size()));
    }
    token_.push_back(static_cast<std::int32_t>(row / call.top_k));
  }
  begin_.push_back(static_cast<std::int32_t>(token_.size()));
}

std::int64_t RowExperts::run(const ExpertLayout& layout, const ActivationSpec& activation,
                             const RowCall& call) {
  sort(call);
  const auto active = static_cast<std::int64_t>(addresses_.size());
  if (active == 0) return 0;
  const std::int64_t size = layout.hidden_size, values = call.num_tokens * size;
  hidden_.resize(std::max<std::size_t>(hidden_.size(), values));
  engine_.load(call.hidden, call.type, values, hidden_.data());
  ExpertCall work{active,         call.num_tokens, addresses_.data(), begin_.data(),
                  token_.data(),  hidden_.data(),  call.out};
  if (call.num_tokens == 1) {  // each expert has one row, which can be written to its final place
    work.out_begin = order_.data();
    compute(layout, activation, work);
    return active;
  }
  rows_.resize(std::max<std::size_t>(rows_.size(), token_.size() * size));
  work.out = rows_.data();
  compute(layout, activation, work);
  spread(call, size);
  return active;
}

void RowExperts::compute(const ExpertLayout& layout, const ActivationSpec& activation,
                         const ExpertCall& call) {
  engine_.start(layout, activation, call);
  begun_ = steady_seconds();
  engine_.finish();
  ended_ = steady_seconds();
}

void RowExperts::spread(const RowCall& call, std::int64_t size) const {
  for (std::size_t i = 0; i < order_.size(); ++i)
    std::copy_n(rows_.data() + static_cast<std::int64_t>(i) * size, size,
                call.out + order_[i] * size);
}

}  // namespace tandem
