// Everything that is decided about a layer of a decode step with one token: who computes each active
// expert, what is copied, who leaves the cache. In one call, because in Python it takes 25 us.
//
// The same as tandem.policy.planner decides with the assignment `balanced` and the eviction
// `successor` on one set of slots per layer, to the last bit; see there for the reasons.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "policy_tables.hpp"

namespace tandem {

// What stays the same from layer to layer; times in seconds.
struct LoneTerms {
  double cpu, gpu;   // one expert, one token
  double cpu_first;  // on top, if the CPU has any
  double link;       // one copy
  double cpu_slowdown;   // factor on CPU seconds while the link is busy
  double link_slowdown;  // factor in `link`, which a CPU without experts would not cost
  std::int64_t max_fetches;
  bool never_worse_than_cpu;
};

// A layer whose active experts have one token each. At least one is absent, none is on its way.
// What it names outlives it.
struct LoneLayer {
  const Ids& experts;           // ascending
  const std::uint8_t* states;   // by expert: kEmpty, kCopying, kReady
  const std::uint32_t* worth;   // by expert: what keeping it is worth
  const Ids& members;           // experts with a slot, in the order in which they got it
  std::int64_t free_slots;
  double all_on_cpu;            // seconds of all active experts, without cpu_first
  double now, dense, link_busy;
};

constexpr std::uint8_t kEmpty = 0, kCopying = 1, kReady = 2;
constexpr std::int32_t kNobody = -1;

// Who gets a slot, best first, and who leaves for it; kNobody: a free slot.
using Admitted = std::vector<std::pair<std::int32_t, std::int32_t>>;

struct LoneDecision {
  Ids fetch, spill;  // experts: absent ones that the device takes, ready ones that the CPU takes
  double gpu_seconds, cpu_seconds;
  Admitted admitted;
};

LoneDecision decide(const LoneTerms& terms, const LoneLayer& layer);

constexpr double kUnlimitedCopies = 1 << 30;

// How many copies of `link` seconds end before the next layer; one if the link has nothing to do.
std::int64_t idle_copies(double link, double link_busy, double now, double next_plan);

// Of the experts that ask for a slot, in ascending order, those that get to ask, best first: all
// that are in `first`, and others while the link has room for their copies.
Ids newcomers(Ids asking, const std::uint32_t* worth, std::int64_t room, const Ids& first);

// Pairs experts that ask for a slot, best first, with those that leave, as tandem.policy.admission.
Admitted admit(const LoneLayer& layer, const Ids& wanted);

}  // namespace tandem
