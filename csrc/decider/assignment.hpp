// Decides who computes each active expert of a layer, and which absent ones are copied for it: the
// rules of tandem.policy.assignment that have a native form. Results are equal bit by bit; the
// reasons are explained there.
//
// In a step that is one graph, hits stay on the device, which has published them, and the CPU
// computes experts whose copy is under way. In a planned step either processor may compute any
// expert.
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

// Costs on one machine in seconds, as in tandem.policy.cost.
struct Costs {
  std::vector<double> cpu, gpu;  // per expert, by tokens
  double cpu_first;  // added once if the CPU computes any expert
  double link;  // per copy
  double cpu_slowdown = 1.0;  // factor on CPU seconds while the link is busy
  // Factor contained in `link`, which does not apply if the CPU computes no experts.
  double link_slowdown = 1.0;
  double copy_wake = 0.0;  // time that the copying thread needs before and after a fetch
  double read = 0.0;  // per expert from a disk
};

// Throws std::out_of_range if there are more tokens than costs.
double seconds_of(const std::vector<double>& by_tokens, std::int32_t tokens);

// The active experts of a layer, all by position; as in tandem.policy.assignment.problem.
struct LayerProblem {
  std::vector<double> cpu, gpu;  // seconds
  std::vector<double> wait;  // until it has arrived: 0 ready, negative: absent
  Scores scores;
  double cpu_first, link, link_busy;
  double cpu_slowdown, link_slowdown, copy_wake;
  std::int64_t max_fetches;
  double read;  // per expert from a disk
  std::vector<Place> places;  // where memory over a disk has each; empty: memory has all

  bool is_on_disk(std::int32_t i) const { return !places.empty() && places[i] == Place::kOnDisk; }
};

// Writes the costs of a layer's experts, by the tokens of each.
void pose(const Costs& costs, const Ids& tokens, LayerProblem& problem);

using Positions = Ids;

// Sorts by CPU time, longest first; if equal, by score, highest first.
void sort_by_cpu(const LayerProblem& problem, Positions& order);

// Experts that are read from a disk for the CPU, in this order: the CPU's seconds, and when it is
// done if it has nothing else to do.
struct AsRead {
  double seconds = 0.0, done = 0.0;

  AsRead(const LayerProblem& problem, std::span<const std::int32_t> on_cpu);
};

struct Split {
  Positions fetch;  // absent experts for the device, in the order of their copies
  Positions spill;  // experts with a slot that the CPU computes
  double gpu_seconds, cpu_seconds;
};

Split split(Rule rule, const LayerProblem& problem);

// The rules: one for planned steps, and those for steps in one graph.
Split balanced(const LayerProblem& problem);
Split in_graph(Rule rule, const LayerProblem& problem);

// The split of a planned step: everything on the CPU if that is faster by the rule's costs.
Split never_worse_than_cpu(Rule rule, const LayerProblem& problem, Split found);

// Adds one by one in the given order, as all implementations must.
inline double added(const std::vector<double>& seconds, const Positions& positions) {
  double total = 0.0;
  for (const std::int32_t i : positions) total += seconds[i];
  return total;
}

}  // namespace tandem
