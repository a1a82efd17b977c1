// Experts that are known before their layers are computed: those of layers that are routed by
// token. The decider chooses which of them are read (decider/reads.hpp).
#include <algorithm>
#include <utility>

#include "decider/reads.hpp"
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
  const std::int64_t num = resident_.num_experts;
  std::vector<std::vector<std::uint8_t>> are_there(expected_.size());
  std::vector<ComingUse> coming;
  for (std::size_t layer = 0; layer < expected_.size(); ++layer) {
    if (expected_[layer].empty()) continue;
    const auto number = static_cast<std::int32_t>(layer);
    are_there[layer].resize(num);
    for (const std::int32_t expert : expected_[layer])
      are_there[layer][expert] =
          on_device_[number * num + expert] == kReady || find(number, expert, transit_) != nullptr;
    coming.push_back({number, expected_[layer], are_there[layer].data(),
                      static_cast<std::int64_t>(resident_.free[layer].size())});
  }
  if (coming.empty()) return;
  for (const ReadAhead& read : known_reads(coming, shared_slots()))
    read_ahead(read.layer, read.expert, Cause::kAhead);
}

SharedSlots HostSlots::shared_slots() const {
  SharedSlots found{static_cast<std::int64_t>(transit_.size()), 0, 0};
  for (const Slot& slot : transit_) {
    found.expected += is_expected(slot);
    found.free += slot.layer < 0 || (has_passed(slot) && slot.num_holders == 0);
  }
  return found;
}

}  // namespace tandem
