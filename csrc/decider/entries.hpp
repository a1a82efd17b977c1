// Decides which experts get a slot, and whom they replace: in a GPU's memory, in planned and
// captured steps, and in memory over a disk. Decisions equal those of tandem.policy.decider with
// the eviction `next-use` on one set of slots per layer, bit by bit; the reasons are explained
// there.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "policy_tables.hpp"

namespace tandem {

// A layer and its slots. Everything it references must outlive it.
struct LayerSlots {
  const Ids& experts;  // active experts, ascending
  const std::uint8_t* states;  // by expert: kEmpty, kCopying, kReady
  const std::uint32_t* scores;  // by expert, from the eviction
  const Ids& members;  // experts with a slot, in the order in which they got it
  std::int64_t free_slots;
};

constexpr std::uint8_t kEmpty = 0, kCopying = 1, kReady = 2;
constexpr std::int32_t kNone = -1;

// (expert that gets a slot, expert that it replaces), best first; kNone: a free slot.
using Admitted = std::vector<std::pair<std::int32_t, std::int32_t>>;

constexpr double kUnlimitedCopies = 1 << 30;

// How many copies of `link` seconds end before the next layer; at least one if the link is idle.
std::int64_t idle_copies(double link, double link_busy, double now, double next_plan);

// Sorts by score, best first; equal ones keep their order. Used for experts that ask for a slot,
// and for those of a prompt's next layer, which uses nearly all of its experts.
Ids by_score(Ids experts, const std::uint32_t* scores);

// Active experts that are absent ask for a slot, best first, while the link has `room` for their
// copies. Those that are copied anyway always ask: `fetched` ones, and active ones in `staged`,
// which were prefetched.
Admitted entries(const LayerSlots& layer, const Ids& staged, const Ids& fetched, std::int64_t room);

// Pairs experts that ask for a slot with those that leave; same as tandem.policy.admission.
Admitted admit(const LayerSlots& layer, Ids asking);

// Pairs experts in their order with those that leave, without comparing scores: first with free
// slots, then with the lowest scores.
Admitted over_lowest(const LayerSlots& layer, const Ids& entering);

}  // namespace tandem
