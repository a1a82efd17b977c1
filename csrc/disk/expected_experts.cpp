// Experts that are known for sure before their layers are computed: those of layers that are routed by
// the token alone. They are read in the order of their use, into free slots of their layers and into
// half of the transit slots, the others being left to what is asked for.
#include <algorithm>
#include <utility>

#include "disk/host_slots.hpp"

namespace tandem {

void HostSlots::expect(std::vector<Ids> experts) {
  const std::lock_guard lock(mutex_);
  expected_ = std::move(experts);
  read_expected();
}

bool HostSlots::is_expected(const Slot& slot) const {
  if (slot.layer < 0 || slot.layer >= static_cast<std::int32_t>(expected_.size())) return false;
  const Ids& experts = expected_[slot.layer];
  return std::find(experts.begin(), experts.end(), slot.expert) != experts.end();
}

void HostSlots::read_expected() {
  const auto most = static_cast<std::ptrdiff_t>(transit_.size() / 2);
  for (std::size_t layer = 0; layer < expected_.size(); ++layer)
    for (const std::int32_t expert : expected_[layer]) {
      const auto number = static_cast<std::int32_t>(layer);
      const bool is_on_device =
          on_device_[layer * resident_.num_experts + expert] == kReady;
      if (is_on_device || find(number, expert, transit_) != nullptr) continue;
      const auto taken = std::count_if(transit_.begin(), transit_.end(),
                                       [&](const Slot& slot) { return is_expected(slot); });
      if (resident_.free[layer].empty() && taken >= most) return;
      if (!read_ahead(number, expert)) return;
    }
}

}  // namespace tandem
