// Fills the slots that are free after loading while the disk is idle. A prompt needs nearly all
// experts and would wait for them.
#include <utility>

#include "disk/host_slots.hpp"

namespace tandem {
namespace {

// Reads at a time. A demanded read never waits behind more than these.
constexpr int kFillingReads = 2;

}  // namespace

void HostSlots::fill() {
  if (std::exchange(is_filled_, true)) return;
  for (int i = 0; i < kFillingReads; ++i) fill_next();
}

// Called from any thread, also from readers.
void HostSlots::fill_next() {
  const std::lock_guard lock(mutex_);
  for (; filling_ < resident_.num_layers; ++filling_) {
    if (resident_.free[filling_].empty()) continue;
    for (std::int32_t expert = 0; expert < layers_[filling_].num_experts; ++expert) {
      if (is_wanted(filling_, expert) || find(filling_, expert, transit_) != nullptr) continue;
      Slot& slot = slots_[filling_][resident_.insert(filling_, expert)];
      read_into(slot, filling_, expert, Cause::kFilling);
      return;
    }
  }
}

}  // namespace tandem
