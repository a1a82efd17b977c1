// Who computes the misses of one layer of a captured step: the CPU, or the device as soon as each has
// been copied into a staging slot. Hits are the device's, which has published them, and an expert whose
// copy is under way is the CPU's. The same as the rules of tandem.policy.assignment.in_graph, to the
// last bit; see there for the reasons.
#pragma once

#include <cstdint>
#include <vector>

#include "policy_tables.hpp"

namespace tandem {

enum class GraphRule : std::uint8_t { kReadyOnGpu, kBalanced, kDali };

// The active experts of a layer, all by position.
struct GraphProblem {
  std::vector<double> cpu, gpu;       // seconds
  std::vector<std::uint8_t> states;   // kEmpty, kCopying, kReady
  std::vector<std::uint32_t> scores;
  double cpu_first, link, link_busy;  // as tandem.policy.assignment.problem has them
  double cpu_slowdown, link_slowdown, copy_wake;
  std::int64_t max_fetches;
};

struct GraphSplit {
  std::vector<std::int32_t> fetch;  // positions, in the order of their copies
  double gpu_seconds, cpu_seconds;
};

GraphSplit split(GraphRule rule, const GraphProblem& problem);

}  // namespace tandem
