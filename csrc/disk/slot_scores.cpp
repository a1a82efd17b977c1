// The eviction's scores of host slots, including what a device has.
#include <algorithm>

#include "disk/host_slots.hpp"

namespace tandem {
namespace {

// Same as in tandem.policy.eviction.next_use: a prompt counts as at most this many steps of one
// token.
constexpr std::int64_t kPromptTokens = 16;

}  // namespace

// Reports the used experts to the eviction.
void HostSlots::note(const ExpertUse& use) {
  if (use.layer <= layer_) ++step_;
  if (use.layer != layer_ + 1) above_.clear();
  is_prompt_ = is_prompt(use.num_tokens);
  NextUseTable* table = layers_[use.layer].table;
  const Ids in_use(is_prompt_ ? use.last.begin() : use.experts.begin(),
                   is_prompt_ ? use.last.end() : use.experts.end());
  if (table == nullptr) {
    for (const std::int32_t expert : use.experts) last_use_[use.layer][expert] = step_;
    return;
  }
  std::int64_t divisor = 1;
  if (is_prompt_)
    divisor = std::max<std::int64_t>(batch_, use.num_tokens / kPromptTokens);
  else
    batch_ = static_cast<std::int32_t>(std::max<std::int64_t>(1, use.num_tokens));
  table->note(experts_, Ids(use.tokens.begin(), use.tokens.end()),
              static_cast<std::int32_t>(divisor), in_use, above_);
  above_ = in_use;
  has_learned_ = false;
}

// The eviction's score of each expert; experts that a device has get the lowest.
Scores HostSlots::scores_of(std::int32_t layer) const {
  const NextUseTable* table = layers_[layer].table;
  Scores found = table == nullptr ? last_use_[layer] : table->values();
  rank_last(on_device_.data() + layer * resident_.num_experts, found);
  return found;
}

void HostSlots::note_on_device(const std::uint8_t* states) {
  const auto lock = locked();
  on_device_.assign(states, states + resident_.state.size());
}

void HostSlots::learn() {
  if (!has_learned_) layers_[layer_].table->learn();
  has_learned_ = true;
}

}  // namespace tandem
