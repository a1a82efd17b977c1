// Who gets a slot of a cache, and who leaves for it: in a GPU's memory, in planned steps and in
// captured ones, and in memory over a disk. The same as tandem.policy.decider decides with the
// eviction `next-use` on one set of slots per layer, to the last bit; see there for the reasons.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "policy_tables.hpp"

namespace tandem {

// A layer and its slots; what it names outlives it.
struct LayerSlots {
  const Ids& experts;          // active ones, ascending
  const std::uint8_t* states;  // by expert: kEmpty, kCopying, kReady
  const std::uint32_t* scores;  // by expert, of the eviction
  const Ids& members;          // experts with a slot, in the order in which they got it
  std::int64_t free_slots;
};

constexpr std::uint8_t kEmpty = 0, kCopying = 1, kReady = 2;
constexpr std::int32_t kNone = -1;

// Who gets a slot, best first, and who leaves for it; kNone: a free slot.
using Admitted = std::vector<std::pair<std::int32_t, std::int32_t>>;

constexpr double kUnlimitedCopies = 1 << 30;

// How many copies of `link` seconds end before the next layer; one if the link has nothing to do.
std::int64_t idle_copies(double link, double link_busy, double now, double next_plan);

// Best first, among equals as they are: who asks for a slot, and which experts of its next layer a
// prompt, which uses nearly all of them, has copied or read ahead.
Ids by_score(Ids experts, const std::uint32_t* scores);

// The active experts that are absent ask for a slot, best first, as long as the link has `room` for
// their copies. Those that are copied anyway always ask: the `fetched` ones, and the active ones that
// are `staged`, which were copied ahead.
Admitted entries(const LayerSlots& layer, const Ids& staged, const Ids& fetched, std::int64_t room);

// Pairs experts that ask for a slot with those that leave, as tandem.policy.admission.
Admitted admit(const LayerSlots& layer, Ids asking);

// Pairs experts with those that leave, without asking who is worth more: as they are here, into free
// slots first, then over the lowest.
Admitted over_lowest(const LayerSlots& layer, const Ids& entering);

}  // namespace tandem
