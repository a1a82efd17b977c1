// Slots that are free after a load are filled while the disk has nothing else to do: a prompt wants
// nearly all experts, and would wait for them.
#include <utility>

#include "disk/host_slots.hpp"

namespace tandem {
namespace {

// So many reads at once: what is waited for is not behind more than these.
constexpr int kFillingReads = 2;

}  // namespace

void HostSlots::fill() {
  if (std::exchange(is_filled_, true)) return;
  for (int i = 0; i < kFillingReads; ++i) fill_next();
}

// From any thread, readers among them.
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
