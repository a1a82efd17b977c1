// Hands out a use's experts as their reads end, waits for them, and ends the use.
#include <algorithm>
#include <chrono>

#include "disk/host_slots.hpp"

namespace tandem {
namespace {

// Experts of a prompt that are handed out at once while the disk has work: its next reads begin
// when their slots are free.
constexpr std::size_t kPromptGroup = 8;

}  // namespace

void HostSlots::release_handed_out() {
  for (std::size_t i = 0; i < wanted_.size(); ++i) {
    Wanted& one = wanted_[i];
    if (!one.is_handed_out || one.is_done) continue;
    one.is_done = true;
    if (one.was_under_way) admit_late(one, experts_[i]);
    if (!is_resident(*one.slot)) leave(*one.slot);
    one.slot = nullptr;
  }
}

// Hands out experts that have arrived; returns whether all have been handed out. A prompt gets those
// in transit slots first, and few at a time, so that the disk never rests for want of a slot.
bool HostSlots::hand_out() {
  arrived_.clear();
  if (!is_prompt_ || !has_reads_left())
    return hand_out(wanted_.size(), [](const Slot&) { return true; });
  const bool is_all =
      hand_out(kPromptGroup, [this](const Slot& slot) { return !is_resident(slot); });
  return hand_out(kPromptGroup, [this](const Slot& slot) { return is_resident(slot); }) && is_all;
}

// Hands out experts in slots of this kind until there are `most`; returns whether none was left.
template <class IsOfKind>
bool HostSlots::hand_out(std::size_t most, const IsOfKind& is_of_kind) {
  bool is_all = true;
  for (std::size_t i = 0; i < wanted_.size(); ++i) {
    Wanted& one = wanted_[i];
    if (one.is_done || one.is_handed_out) continue;
    is_all = false;
    if (arrived_.size() == most) break;
    if (one.slot == nullptr || !one.slot->read.has_ended() || !is_of_kind(*one.slot)) continue;
    if (one.slot->read.state == DiskRead::State::kFailed) {
      require_read(*one.slot, layer_, one.is_demanded);
      continue;
    }
    one.is_handed_out = true;
    arrived_.push_back(
        {static_cast<std::int64_t>(i), one.slot->read.data(), is_resident(*one.slot)});
  }
  return is_all;
}

// Whether the current use, or the next layer's, still has experts to read for want of a slot.
bool HostSlots::has_reads_left() const {
  return !ahead_.empty() || std::any_of(wanted_.begin(), wanted_.end(), [](const Wanted& one) {
    return one.slot == nullptr && !one.is_done;
  });
}

std::span<const HostSlots::Arrived> HostSlots::there() {
  const std::lock_guard lock(mutex_);
  release_handed_out();
  use_transit_slots();
  hand_out();
  return arrived_;
}

std::span<const HostSlots::Arrived> HostSlots::next() {
  std::unique_lock lock(mutex_);
  release_handed_out();
  const Moment last = end_of(use_patience_ > 0.0 ? use_patience_ : patience_);
  while (true) {
    use_transit_slots();
    const std::uint32_t seen = readers_.ended();
    if (hand_out() || !arrived_.empty()) return arrived_;
    learn();
    lock.unlock();
    if (!arrives(seen, last)) {
      if (use_patience_ > 0.0)
        throw DiskSlow(layers_[layer_].path + " delivered an expert too late");
      give_up(layer_);
    }
    lock.lock();
  }
}

HostSlots::Moment HostSlots::end_of(double patience) const {
  const std::chrono::duration<double> seconds(patience);
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(seconds);
}

// Waits until a read has ended since `seen`; returns false if none has by `last`.
bool HostSlots::arrives(std::uint32_t seen, Moment last) {
  const Moment begin = std::chrono::steady_clock::now();
  const std::chrono::duration<double> left = last - begin;
  const bool has_come = left.count() > 0.0 && readers_.wait(seen, left.count());
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  const std::lock_guard lock(mutex_);
  counts_.waited_seconds += waited.count();
  return has_come;
}

void HostSlots::give_up(std::int32_t layer) const {
  throw DiskError(layers_[layer].path + " delivered no expert for " +
                  std::to_string(static_cast<std::int64_t>(patience_)) +
                  " seconds; check the disk, and send the request again");
}

// After a failed read: throws if the waiting use has requested it. A read that was made ahead, or
// for an earlier request that failed, is requested again.
void HostSlots::require_read(Slot& slot, std::int32_t layer, bool& is_demanded) {
  if (is_demanded) throw DiskError(slot.read.why());
  is_demanded = true;
  read_into(slot, layer, slot.expert, Cause::kDemand);
}

void HostSlots::end() noexcept {
  const std::lock_guard lock(mutex_);
  release_handed_out();
  // After an error, a slot that is still being read into becomes free when the read has ended.
  for (Wanted& one : wanted_) {
    if (one.slot != nullptr && !is_resident(*one.slot) && one.slot->read.has_ended())
      leave(*one.slot);
  }
  wanted_.clear();
  learn();
  settle(layer_);
  resize(layer_);
}

}  // namespace tandem
