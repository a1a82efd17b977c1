#include "decider/reads.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tandem {
namespace {

// Same as in tandem.policy.reads.
constexpr std::int64_t kMostStepTokens = 32;
constexpr std::int32_t kLeastChance = kCertain * 3 / 8;
constexpr int kForget = 5;
constexpr std::int64_t kLookAgainSteps = 32;
constexpr std::int64_t kBlockSteps = 8, kTrialSteps = 4 * kBlockSteps, kKeptSteps = 512;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

std::vector<ReadAhead> known_reads(const std::vector<ComingUse>& coming, SharedSlots shared) {
  std::vector<ReadAhead> found;
  for (const ComingUse& use : coming) {
    std::int64_t free_slots = use.free_slots;
    for (const std::int32_t expert : use.experts) {
      if (use.are_there[expert] != 0) continue;
      const bool passes = free_slots == 0;
      if (passes && (shared.expected >= shared.all / 2 || shared.free == 0)) return found;
      found.push_back({use.layer, expert, passes});
      free_slots -= !passes;
      shared.free -= passes;
      shared.expected += passes;
    }
  }
  return found;
}

bool is_prompt(std::int64_t num_tokens) { return num_tokens > kMostStepTokens; }

Ids prompt_reads(const std::uint8_t* on_device, const Scores& scores, std::size_t most) {
  Ids found(scores.size());
  std::iota(found.begin(), found.end(), 0);
  std::erase_if(found, [&](std::int32_t expert) { return on_device[expert] == kReady; });
  found = by_score(std::move(found), scores.data());
  found.resize(std::min(found.size(), most));
  return found;
}

void rank_last(const std::uint8_t* on_device, Scores& scores) {
  for (std::size_t expert = 0; expert < scores.size(); ++expert)
    if (on_device[expert] == kReady) scores[expert] = 0;
}

Ids likely_reads(const std::vector<LikelyExpert>& likely, const Chances& chances,
                 std::int64_t num_shared) {
  std::vector<LikelyExpert> chosen;
  for (const LikelyExpert& one : likely)
    if (chances[one.rank] >= kLeastChance) chosen.push_back(one);
  std::stable_sort(chosen.begin(), chosen.end(),
                   [](const auto& a, const auto& b) { return a.rank < b.rank; });
  Ids found;
  for (const LikelyExpert& one : chosen)
    if (static_cast<std::int64_t>(found.size()) < num_shared / 4) found.push_back(one.expert);
  return found;
}

bool may_look_ahead(const Chances& chances, std::int64_t step) {
  return step % kLookAgainSteps == 0 ||
         std::any_of(chances.begin(), chances.end(),
                     [](std::int32_t chance) { return chance >= kLeastChance; });
}

bool LookAheadTrial::looks() const {
  const std::int64_t block = step_ / kBlockSteps;
  return step_ < kTrialSteps ? block == 0 || block == 3 : is_better_;
}

void LookAheadTrial::begin() {
  step_ = 0;
  without_.clear();
  with_.clear();
}

void LookAheadTrial::end_step(std::int64_t num_tokens, double seconds) {
  if (step_ < kTrialSteps) {
    if (num_tokens != num_tokens_) {
      num_tokens_ = num_tokens;
      begin();
      return;
    }
    if (step_ % kBlockSteps > 0) (looks() ? with_ : without_).push_back(seconds);
  }
  ++step_;
  if (step_ == kTrialSteps) is_better_ = median(with_) < median(without_);
  if (step_ == kTrialSteps + kKeptSteps) begin();
}

std::int32_t updated_chance(std::int32_t chance, bool was_used) {
  return chance + (((was_used ? kCertain : 0) - chance) >> kForget);
}

bool may_lend(std::int64_t num_lent, std::int64_t num_shared) {
  return 2 * (num_lent + 1) <= num_shared;
}

bool may_take_room(std::int64_t num_free, bool waits) { return num_free > (waits ? 0 : 1); }

}  // namespace tandem
