// Experts in host slots that are held for copies to a device, from any thread, independent of the
// layer's current use.
//
// If an expert is in no slot, it is read into a room. The decider says what may be lent
// (decider/reads.hpp).
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "disk/host_slots.hpp"

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kLookEvery{1};

}  // namespace

// Returns the slot that has the expert or into which it is being read; null: there is none, or it
// may not be lent.
HostSlots::Slot* HostSlots::slot_to_hold(std::int32_t layer, std::int32_t expert) {
  if (Slot* slot = find(layer, expert, held_)) return slot;
  const auto num_held = std::count_if(transit_.begin(), transit_.end(),
                                      [](const Slot& slot) { return slot.num_holders > 0; });
  const auto num_shared = static_cast<std::int64_t>(transit_.size());
  return may_lend(num_held, num_shared) ? find(layer, expert, transit_) : nullptr;
}

HostSlots::Slot* HostSlots::free_room(bool waits) {
  Slot* found = nullptr;
  int num_free = 0;
  for (Slot& room : held_) {
    if (room.num_holders > 0 || !room.read.has_ended()) continue;
    found = &room;
    ++num_free;
  }
  return may_take_room(num_free, waits) ? found : nullptr;
}

ExpertHold HostSlots::try_hold(std::int32_t layer, std::int32_t expert, bool waits) {
  settle(layer);
  Slot* slot = slot_to_hold(layer, expert);
  const bool is_demanded = slot == nullptr;
  if (is_demanded) {
    slot = free_room(waits);
    if (slot == nullptr) return {};
    read_into(*slot, layer, expert, waits ? Cause::kDemand : Cause::kAhead);
  }
  ++(is_demanded ? counts_.device_misses : counts_.device_hits);
  ++slot->num_holders;
  // A held expert must not be evicted.
  if (is_resident(*slot)) resident_.state[layer * resident_.num_experts + expert] = kCopying;
  return {layer, expert, slot->read.data(), is_demanded};
}

ExpertHold HostSlots::hold(std::int32_t layer, std::int32_t expert, bool waits) {
  auto lock = locked();
  ExpertHold found = try_hold(layer, expert, waits);
  while (waits && found.address == nullptr) {
    is_let_go_.wait_for(lock, kLookEvery);  // wake up also when a read ends that no thread holds
    found = try_hold(layer, expert, waits);
  }
  return found;
}

HostSlots::Slot& HostSlots::slot_of(const ExpertHold& hold) {
  for (std::deque<Slot>* slots : {&slots_.at(hold.layer), &held_, &transit_})
    for (Slot& slot : *slots)
      if (slot.num_holders > 0 && slot.layer == hold.layer && slot.expert == hold.expert &&
          slot.read.data() == hold.address)
        return slot;
  throw std::invalid_argument("the expert is not held");
}

bool HostSlots::has_come(const ExpertHold& hold) {
  const auto lock = locked();
  return slot_of(hold).read.has_ended();
}

void HostSlots::wait_for(ExpertHold& hold) {
  auto lock = locked();
  Slot& slot = slot_of(hold);
  if (!slot.read.has_ended()) readers_.demand(slot.read);
  const Moment last = end_of(patience_);
  while (true) {
    const std::uint32_t seen = readers_.ended();
    if (slot.read.state == DiskRead::State::kDone) return;
    if (slot.read.has_ended()) require_read(slot, hold.layer, hold.is_demanded);
    lock.unlock();
    if (!arrives(seen, last)) give_up(hold.layer);
    lock.lock();
  }
}

void HostSlots::let_go(const ExpertHold& hold) noexcept {
  if (!readers_.home().is_here()) return;
  {
    const std::lock_guard lock(mutex_);
    Slot& slot = slot_of(hold);
    if (--slot.num_holders == 0 && (slot.is_passed || slot.is_coming_back)) leave(slot);
    slot.is_coming_back = false;
  }
  is_let_go_.notify_all();
}

// Returns how an expert that leaves the device gets a slot here; empty: it does not.
Admitted HostSlots::admitted_back(std::int32_t layer, std::int32_t expert) const {
  if (resident_.slot_of[layer * resident_.num_experts + expert] >= 0) return {};
  Scores scores = scores_of(layer);
  const NextUseTable* table = layers_[layer].table;
  scores[expert] = table == nullptr ? last_use_[layer][expert] : table->values()[expert];
  // Experts that the current use needs stay.
  const Ids used = layer == layer_ && !wanted_.empty() ? experts_ : Ids{};
  const LayerSlots now{used, resident_.state.data() + layer * resident_.num_experts, scores.data(),
                       resident_.members[layer],
                       static_cast<std::int64_t>(resident_.free[layer].size())};
  return admit(now, {expert});
}

ExpertHold HostSlots::take_back(std::int32_t layer, std::int32_t expert) {
  const auto lock = locked();
  settle(layer);
  if (!has_one_size_ || find(layer, expert, held_) != nullptr) return {};
  if (admitted_back(layer, expert).empty()) return {};
  Slot* room = free_room(false);
  if (room == nullptr) return {};
  describe(*room, layer, expert);
  room->is_coming_back = true;
  room->num_holders = 1;
  return {layer, expert, room->read.data(), false};
}

// Takes the place of the expert with the lowest score, if it may still do so.
void HostSlots::keep(const ExpertHold& hold) noexcept {
  const std::lock_guard lock(mutex_);
  Slot& room = slot_of(hold);
  room.is_coming_back = false;
  room.read.state = DiskRead::State::kDone;
  settle(hold.layer);
  for (const auto& [expert, victim] : admitted_back(hold.layer, hold.expert)) {
    if (victim != kNone) resident_.remove(hold.layer, victim);
    Slot& slot = slots_[hold.layer][resident_.insert(hold.layer, expert)];
    slot.trade(room);
    slot.num_holders = std::exchange(room.num_holders, 0);
    ++counts_.kept;
  }
}

}  // namespace tandem
