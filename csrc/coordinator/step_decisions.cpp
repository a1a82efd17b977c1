#include "coordinator/step_decisions.hpp"

namespace tandem {

void StepDecisions::begin_step() {
  copying_.begin_step();
  num_decided_ = 0;
  if (policy_ != nullptr) policy_->begin_step(dense_);
}

void StepDecisions::note(const LayerRecord& record) {
  if (policy_ == nullptr) return;
  if (decided_.size() == num_decided_) decided_.emplace_back();
  DecidedLayer& now = decided_[num_decided_++];
  now.layer = static_cast<std::int32_t>(record.layer);
  now.now = record.answered;
  now.arrivals.clear();
  copying_.take_arrivals(now.arrivals);
  for (const Arrival& arrival : now.arrivals)
    policy_->copy_finished(arrival.layer, arrival.expert, arrival.seconds);
  count(record);
  // Nothing is fetched for a layer that has been answered: its rule is `ready-on-gpu`.
  const std::span<const SlotCopy> copies =
      policy_->decide(now.layer, experts_, tokens_, record.answered).insert;
  now.copies.assign(copies.begin(), copies.end());
  copying_.submit(copies);
  policy_->learn(now.layer);
}

// The active experts in ascending order, and how many tokens each has.
void StepDecisions::count(const LayerRecord& record) {
  const std::int64_t num_experts = policy_->resident().num_experts;
  tokens_of_.assign(num_experts, 0);
  for (const std::int32_t expert : record.choice)
    if (expert >= 0 && expert < num_experts) ++tokens_of_[expert];
  experts_.clear();
  tokens_.clear();
  for (std::int32_t expert = 0; expert < num_experts; ++expert) {
    if (tokens_of_[expert] == 0) continue;
    experts_.push_back(expert);
    tokens_.push_back(tokens_of_[expert]);
  }
}

}  // namespace tandem
