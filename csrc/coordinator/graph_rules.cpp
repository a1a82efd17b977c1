#include "coordinator/graph_rules.hpp"

#include <algorithm>
#include <cmath>

#include "lone_layer.hpp"

namespace tandem {
namespace {

using Positions = std::vector<std::int32_t>;

struct Published {
  double held_seconds = 0.0;
  Positions absent, under_way;

  explicit Published(const GraphProblem& problem) {
    for (std::size_t i = 0; i < problem.states.size(); ++i) {
      if (problem.states[i] == kReady)
        held_seconds += problem.gpu[i];
      else
        (problem.states[i] == kEmpty ? absent : under_way).push_back(static_cast<std::int32_t>(i));
    }
  }
};

double added(const std::vector<double>& seconds, const Positions& positions) {
  double total = 0.0;
  for (const std::int32_t i : positions) total += seconds[i];
  return total;
}

// The second launch waits for the hits, for the CPU's share and for the last copy.
GraphSplit priced(const GraphProblem& problem, const Published& layer, const Positions& fetch) {
  Positions left = layer.under_way;
  for (const std::int32_t i : layer.absent)
    if (std::find(fetch.begin(), fetch.end(), i) == fetch.end()) left.push_back(i);
  const double link = left.empty() ? problem.link / problem.link_slowdown : problem.link;
  double arrived = problem.link_busy;
  if (!fetch.empty()) arrived = std::max(arrived, problem.copy_wake);
  for (std::size_t i = 0; i < fetch.size(); ++i) arrived += link;
  GraphSplit found{fetch, layer.held_seconds, 0.0};
  if (!left.empty()) {
    const double cpu = added(problem.cpu, left) + problem.cpu_first;
    found.cpu_seconds = cpu + (problem.cpu_slowdown - 1.0) * std::min(cpu, arrived);
  }
  if (fetch.empty()) return found;
  found.gpu_seconds =
      std::max({found.gpu_seconds, found.cpu_seconds, arrived + problem.copy_wake});
  for (const std::int32_t i : fetch) found.gpu_seconds += problem.gpu[i];
  return found;
}

GraphSplit ready_on_gpu(const GraphProblem& problem) {
  GraphSplit found{{}, 0.0, 0.0};
  bool is_cpu_used = false;
  for (std::size_t i = 0; i < problem.states.size(); ++i) {
    if (problem.states[i] == kReady) {
      found.gpu_seconds += problem.gpu[i];
    } else {
      found.cpu_seconds += problem.cpu[i];
      is_cpu_used = true;
    }
  }
  if (is_cpu_used) found.cpu_seconds += problem.cpu_first;
  return found;
}

GraphSplit balanced(const GraphProblem& problem) {
  const Published layer(problem);
  Positions order = layer.absent;
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return problem.cpu[a] > problem.cpu[b] ||
           (problem.cpu[a] == problem.cpu[b] && problem.scores[a] > problem.scores[b]);
  });
  GraphSplit best = priced(problem, layer, {});
  const auto most = std::min(static_cast<std::int64_t>(order.size()), problem.max_fetches);
  for (std::int64_t count = 1; count <= most; ++count) {
    GraphSplit next = priced(problem, layer, {order.begin(), order.begin() + count});
    if (std::max(next.gpu_seconds, next.cpu_seconds) < std::max(best.gpu_seconds, best.cpu_seconds))
      best = std::move(next);
  }
  return best;
}

GraphSplit dali(const GraphProblem& problem) {
  const Published layer(problem);
  GraphSplit found{{}, layer.held_seconds, added(problem.cpu, layer.under_way)};
  std::vector<double> gpu = problem.gpu;
  for (double& seconds : gpu) seconds = std::max(seconds, problem.link);
  Positions order = layer.absent;
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return std::abs(gpu[a] - problem.cpu[a]) > std::abs(gpu[b] - problem.cpu[b]);
  });
  for (const std::int32_t i : order) {
    const bool is_full = static_cast<std::int64_t>(found.fetch.size()) >= problem.max_fetches;
    if (!is_full && found.gpu_seconds + gpu[i] <= found.cpu_seconds + problem.cpu[i]) {
      found.fetch.push_back(i);
      found.gpu_seconds += gpu[i];
    } else {
      found.cpu_seconds += problem.cpu[i];
    }
  }
  return found;
}

}  // namespace

GraphSplit split(GraphRule rule, const GraphProblem& problem) {
  switch (rule) {
    case GraphRule::kBalanced:
      return balanced(problem);
    case GraphRule::kDali:
      return dali(problem);
    default:
      return ready_on_gpu(problem);
  }
}

}  // namespace tandem
