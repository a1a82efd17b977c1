#include "decider/reads.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tandem {
namespace {

// Same as in tandem.policy.reads.
constexpr std::int64_t kMostStepTokens = 32;

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

bool may_lend(std::int64_t num_lent, std::int64_t num_shared) {
  return 2 * (num_lent + 1) <= num_shared;
}

bool may_take_room(std::int64_t num_free, bool waits) { return num_free > (waits ? 0 : 1); }

}  // namespace tandem
