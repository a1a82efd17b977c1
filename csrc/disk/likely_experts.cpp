// Experts that the next layer may use: its router was run ahead. The decider chooses which of them
// are read (decider/reads.hpp).
#include <algorithm>
#include <chrono>

#include "decider/reads.hpp"
#include "disk/host_slots.hpp"

namespace tandem {

void HostSlots::look_ahead(DenseEngine& engine, const RouterInputs& inputs) {
  const auto next = static_cast<std::size_t>(inputs.layer) + 1;
  LookAhead* look_ahead = look_ahead_;
  if (look_ahead != nullptr && look_ahead->hidden_size() != inputs.hidden_size)
    look_ahead = nullptr;
  if (look_ahead != nullptr) look_ahead->learn(inputs);
  if (next >= layers_.size() || is_prompt(inputs.num_tokens) ||
      !may_look_ahead(static_cast<std::int32_t>(next)))
    return;
  Ids predicted;
  if (look_ahead != nullptr) predicted = look_ahead->predict(engine, inputs);
  if (next < script_.size()) predicted = script_[next];
  if (!predicted.empty()) note_likely(static_cast<std::int32_t>(next), predicted, inputs.top_k);
}

// At the beginning of a decode step: tells the trial how long the last one took.
void HostSlots::note_step(const ExpertUse& use) {
  if (use.layer != 0) return;
  const Moment now = std::chrono::steady_clock::now();
  const std::chrono::duration<double> seconds = now - step_began_;
  if (step_tokens_ > 0) trial_.end_step(step_tokens_, seconds.count());
  step_tokens_ = is_prompt(use.num_tokens) ? 0 : use.num_tokens;
  step_began_ = now;
}

// Not if memory has the whole layer.
bool HostSlots::may_look_ahead(std::int32_t layer) const {
  const std::lock_guard lock(mutex_);
  const auto num_there = static_cast<std::int32_t>(resident_.members[layer].size());
  return num_there < layers_[layer].num_experts && (always_looks_ || trial_.looks()) &&
         tandem::may_look_ahead(chances_, step_);
}

void HostSlots::note_likely(std::int32_t layer, const Ids& experts, std::int64_t top_k) {
  const auto lock = locked();
  likely_.clear();
  likely_layer_ = layer;
  if (static_cast<std::int64_t>(chances_.size()) < top_k) chances_.resize(top_k, kFirstChance);
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const std::int32_t expert = experts[i];
    const bool is_there = on_device_[layer * resident_.num_experts + expert] == kReady ||
                          find(layer, expert, transit_) != nullptr ||
                          std::any_of(likely_.begin(), likely_.end(), [&](const LikelyExpert& one) {
                            return one.expert == expert;
                          });
    if (!is_there)
      likely_.push_back({expert, static_cast<std::int32_t>(i) % static_cast<std::int32_t>(top_k)});
  }
  for (const std::int32_t expert :
       likely_reads(likely_, chances_, static_cast<std::int64_t>(transit_.size())))
    counts_.likely += read_ahead(layer, expert, Cause::kLikely);
}

// At the beginning of a layer's use: learns which likely experts it uses; drops the reads of the
// others that have not begun.
void HostSlots::judge_likely(std::int32_t layer) {
  if (layer == likely_layer_) {
    for (const auto& [expert, rank] : likely_) {
      const bool was_used = std::find(experts_.begin(), experts_.end(), expert) != experts_.end();
      chances_[rank] = updated_chance(chances_[rank], was_used);
      if (!was_used)
        withdraw(layer, expert);
      else
        counts_.likely_used += find(layer, expert, transit_) != nullptr;
    }
  }
  likely_.clear();
}

void HostSlots::withdraw(std::int32_t layer, std::int32_t expert) {
  Slot* slot = find(layer, expert, transit_);
  if (slot == nullptr || slot->num_holders > 0 || !readers_.withdraw(slot->read)) return;
  counts_.read_bytes -= slot->read.bytes;
  if (is_resident(*slot))
    resident_.remove(layer, expert);
  else
    leave(*slot);
}

// Gives a slot of its layer to an expert that was still being read when its use began, if eviction
// would have given it one then.
void HostSlots::admit_late(Wanted& wanted, std::int32_t expert) {
  if (!has_one_size_ || is_resident(*wanted.slot) || wanted.slot->num_holders > 0) return;
  const LayerSlots now{experts_, resident_.state.data() + layer_ * resident_.num_experts,
                       scores_.data(), resident_.members[layer_],
                       static_cast<std::int64_t>(resident_.free[layer_].size())};
  for (const auto& [entering, victim] : admit(now, {expert})) {
    if (victim != kNone) resident_.remove(layer_, victim);
    Slot& slot = slots_[layer_][resident_.insert(layer_, entering)];
    slot.trade(*wanted.slot);
    wanted.slot = &slot;
  }
}

}  // namespace tandem
