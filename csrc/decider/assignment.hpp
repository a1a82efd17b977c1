// Who computes each active expert of a layer, and which absent ones are copied for it: the rules of
// tandem.policy.assignment that have a native form, to the last bit; see there for the reasons.
//
// In a step that is one graph hits are the device's, which has published them, and an expert whose
// copy is under way is the CPU's. In a planned one everything may be everybody's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decider/reads.hpp"
#include "policy_tables.hpp"

namespace tandem {

// In the order of tandem.policy.assignment.NATIVE.
enum class Rule : std::uint8_t { kReadyOnGpu, kBalancedInGraph, kDaliInGraph, kBalanced };
constexpr int kNumAssignments = 4;

// What things cost on one machine, in seconds; as tandem.policy.cost has them.
struct Costs {
  std::vector<double> cpu, gpu;  // of an expert, by tokens
  double cpu_first;  // on top, if the CPU has any
  double link;  // one copy
  double cpu_slowdown = 1.0;  // factor on CPU seconds while the link is busy
  double link_slowdown = 1.0;  // factor in `link`, which a CPU without experts would not cost
  double copy_wake = 0.0;  // of the copying thread, ahead of a fetch and behind it
  double read = 0.0;  // of a disk, one expert
};

// Throws std::out_of_range for more tokens than costs go to.
double seconds_of(const std::vector<double>& by_tokens, std::int32_t tokens);

// The active experts of a layer, all by position; as tandem.policy.assignment.problem has them.
struct LayerProblem {
  std::vector<double> cpu, gpu;  // seconds
  std::vector<double> wait;  // until it is there: 0 ready, negative: absent
  Scores scores;
  double cpu_first, link, link_busy;
  double cpu_slowdown, link_slowdown, copy_wake;
  std::int64_t max_fetches;
  double read;  // of a disk, one expert
  std::vector<Place> places;  // where memory over a disk has each of them; empty: it has all

  bool is_on_disk(std::int32_t i) const { return !places.empty() && places[i] == Place::kOnDisk; }
};

// Writes what a layer's experts cost, by the tokens of each.
void pose(const Costs& costs, const Ids& tokens, LayerProblem& problem);

using Positions = Ids;

// Those that take the CPU longest first; of equals those of the higher score.
void sort_by_cpu(const LayerProblem& problem, Positions& order);

// Of experts that a disk reads for the CPU, in this order: its seconds, and when it is done with them
// if it has nothing else to do.
struct AsRead {
  double seconds = 0.0, done = 0.0;

  AsRead(const LayerProblem& problem, std::span<const std::int32_t> on_cpu);
};

struct Split {
  Positions fetch;  // absent ones that the device takes, in the order of their copies
  Positions spill;  // those with a slot that the CPU takes
  double gpu_seconds, cpu_seconds;
};

Split split(Rule rule, const LayerProblem& problem);

// The rules: one by one for planned steps, and those for steps in one graph.
Split balanced(const LayerProblem& problem);
Split in_graph(Rule rule, const LayerProblem& problem);

// The split that a planned step follows: all on the CPU, where the rule's costs say that it is sooner.
Split never_worse_than_cpu(Rule rule, const LayerProblem& problem, Split found);

// Added up one by one, in the order that is written here: all who decide do.
inline double added(const std::vector<double>& seconds, const Positions& positions) {
  double total = 0.0;
  for (const std::int32_t i : positions) total += seconds[i];
  return total;
}

}  // namespace tandem
