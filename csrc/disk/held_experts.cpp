// Experts of host slots that are held in place for copies to a device, by any thread, beside the use
// of a layer that is under way.
#include "disk/host_slots.hpp"

namespace tandem {

// The slot that has an expert, or a free one into which it is being read; null: all are in use.
HostSlots::Slot* HostSlots::slot_to_hold(std::int32_t layer, std::int32_t expert, bool& is_asked) {
  settle(layer);
  if (Slot* slot = find(layer, expert, held_)) {
    ++counts_.hits;
    is_asked = false;
    if (!slot->read.has_ended()) readers_.demand(slot->read);
    return slot;
  }
  for (Slot& one : held_)
    if (one.num_holders == 0 && one.read.has_ended()) {
      ++counts_.misses;
      is_asked = true;
      read_into(one, layer, expert, Cause::kDemand);
      return &one;
    }
  return nullptr;
}

const std::uint8_t* HostSlots::hold(std::int32_t layer, std::int32_t expert) {
  std::unique_lock lock(mutex_);
  Slot* slot = nullptr;
  bool is_asked = false;
  is_let_go_.wait(lock, [&] { return (slot = slot_to_hold(layer, expert, is_asked)) != nullptr; });
  ++slot->num_holders;
  // Not a victim while it is held.
  if (is_resident(*slot)) resident_.state[layer * resident_.num_experts + expert] = kCopying;
  try {
    while (true) {
      const std::uint32_t seen = readers_.ended();
      if (slot->read.state == DiskRead::State::kDone) break;
      if (slot->read.has_ended()) require_read(*slot, layer, is_asked);
      lock.unlock();
      require_arrival(layers_[layer].path, seen);
      lock.lock();
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    --slot->num_holders;
    if (!is_resident(*slot)) slot->layer = -1;
    is_let_go_.notify_all();
    throw;
  }
  return slot->read.data();
}

void HostSlots::let_go(std::int32_t layer, std::int32_t expert, const std::uint8_t* address) {
  const std::lock_guard lock(mutex_);
  const auto is_meant = [&](const Slot& slot) {
    return slot.num_holders > 0 && slot.layer == layer && slot.expert == expert &&
           slot.read.data() == address;
  };
  for (std::deque<Slot>* slots : {&slots_.at(layer), &held_})
    for (Slot& slot : *slots)
      if (is_meant(slot)) {
        --slot.num_holders;
        is_let_go_.notify_all();
        return;
      }
}

}  // namespace tandem
