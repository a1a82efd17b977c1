#include "coordinator/step_decisions.hpp"

#include <algorithm>

#include "coordinator/words.hpp"

namespace tandem {

void StepDecisions::begin_step() {
  copying_.begin_step();
  if (begin()) policy_->begin_step(dense_);
}

// Returns whether the policy must begin a step.
bool StepDecisions::begin() {
  if (std::exchange(has_begun_, true)) return false;
  num_decided_ = 0;
  is_decided_ = false;
  return policy_ != nullptr;
}

void StepDecisions::expect(std::vector<StepPolicy::KnownLoad> known) {
  if (!begin()) return;
  DecidedLayer& here = new_decided(kNone, steady_seconds());
  const StepCopies copies = policy_->begin_step(dense_, std::move(known), here.now);
  here.ahead.assign(copies.ahead.begin(), copies.ahead.end());
  copying_.fetch({}, copies.ahead);
}

std::span<const Fetch> StepDecisions::fetch(std::int64_t layer,
                                            std::span<const std::int32_t> choice,
                                            std::span<const std::int32_t> guess,
                                            std::span<const PlacedMiss> misses) {
  fetches_.clear();
  if (policy_ == nullptr || !policy_->decides_first(static_cast<std::int32_t>(layer)))
    return {};
  decide(layer, choice, guess, misses, steady_seconds());
  is_decided_ = true;
  const std::span<const FetchWord> words = copying_.fetch(copies_.fetch, copies_.ahead);
  for (std::size_t i = 0; i < words.size(); ++i) {
    const FetchCopy& found = copies_.fetch[i];
    fetches_.push_back({found.copy.expert, copying_.address(found.copy.slot),
                        found.arrives + found.cpu_seconds, words[i]});
  }
  return fetches_;
}

void StepDecisions::note(const LayerRecord& record) {
  if (policy_ == nullptr) return;
  if (!std::exchange(is_decided_, false)) {
    decide(record.layer, record.choice, record.guess, {}, record.answered);
    for (const FetchWord& word : copying_.fetch(copies_.fetch, copies_.ahead))
      word.claim();  // no step waits for it any more
  }
  copying_.submit(copies_.insert, false);
  const auto layer = static_cast<std::int32_t>(record.layer), next = layer + 1;
  if (next < policy_->resident().num_layers && policy_->decides_first(next)) copying_.look_out();
  policy_->learn(layer);
  policy_->warm_up(next);
}

// Called also after a lost step: experts that got a slot are copied there anyway.
void StepDecisions::end_step() {
  has_begun_ = false;
  if (policy_ == nullptr) return;
  if (std::exchange(is_decided_, false)) copying_.submit(copies_.insert, false);
  copying_.clear(policy_->end_step());
}

// Adds a layer about which something is decided now, after reporting the copies that have ended.
DecidedLayer& StepDecisions::new_decided(std::int32_t layer, double now) {
  if (decided_.size() == num_decided_) decided_.emplace_back();
  DecidedLayer& here = decided_[num_decided_++];
  here.layer = layer;
  here.now = now;
  here.arrivals.clear();
  here.ahead.clear();
  here.copies.clear();
  here.staged.clear();
  here.num_needed = 0;
  copying_.take_arrivals(here.arrivals);
  for (const Arrival& arrival : here.arrivals)
    policy_->copy_finished(arrival.layer, arrival.expert, arrival.seconds);
  return here;
}

void StepDecisions::decide(std::int64_t layer, std::span<const std::int32_t> choice,
                           std::span<const std::int32_t> guess, std::span<const PlacedMiss> misses,
                           double now) {
  DecidedLayer& here = new_decided(static_cast<std::int32_t>(layer), now);
  count(choice, load_);
  count(guess, guess_);
  places_.assign(misses.empty() ? 0 : load_.experts.size(), Place::kInSlot);
  for (const PlacedMiss& miss : misses) {
    const auto at = std::lower_bound(load_.experts.begin(), load_.experts.end(), miss.expert);
    places_[at - load_.experts.begin()] = miss.place;
  }
  copies_ = policy_->decide(here.layer, load_, guess_, now, places_);
  if (!copies_.left.empty()) copying_.clear({copies_.left.begin(), copies_.left.end()});
  here.ahead.assign(copies_.ahead.begin(), copies_.ahead.end());
  here.copies.assign(copies_.entered.begin(), copies_.entered.end());
  for (const FetchCopy& found : copies_.fetch)
    if (found.is_staged) here.staged.push_back(found.copy);
  here.num_needed = copies_.num_needed;
}

// Counts tokens by active expert, in ascending order of experts.
void StepDecisions::count(std::span<const std::int32_t> choice, Load& load) {
  load.experts.clear();
  load.tokens.clear();
  if (choice.empty()) return;
  const std::int64_t num_experts = policy_->resident().num_experts;
  tokens_of_.assign(num_experts, 0);
  for (const std::int32_t expert : choice)
    if (expert >= 0 && expert < num_experts) ++tokens_of_[expert];
  for (std::int32_t expert = 0; expert < num_experts; ++expert) {
    if (tokens_of_[expert] == 0) continue;
    load.experts.push_back(expert);
    load.tokens.push_back(tokens_of_[expert]);
  }
}

}  // namespace tandem
