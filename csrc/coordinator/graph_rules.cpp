#include "coordinator/graph_rules.hpp"

#include <algorithm>
#include <cmath>
#include <span>

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

// The second launch waits for the hits, for the CPU's share and for the last copy. `is_fetched` says
// by position what `fetch` says: a layer is priced once for each number of fetches.
GraphSplit priced(const GraphProblem& problem, const Published& layer,
                  std::span<const std::int32_t> fetch, const std::vector<std::uint8_t>& is_fetched) {
  const bool is_cpu_used = !layer.under_way.empty() || fetch.size() < layer.absent.size();
  const double link = is_cpu_used ? problem.link : problem.link / problem.link_slowdown;
  double arrived = problem.link_busy;
  if (!fetch.empty()) arrived = std::max(arrived, problem.copy_wake);
  for (std::size_t i = 0; i < fetch.size(); ++i) arrived += link;
  GraphSplit found{{}, layer.held_seconds, 0.0};
  if (is_cpu_used) {
    double cpu = added(problem.cpu, layer.under_way);
    for (const std::int32_t i : layer.absent)
      if (is_fetched[i] == 0) cpu += problem.cpu[i];
    cpu += problem.cpu_first;
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
  const std::span<const std::int32_t> all(order);
  std::vector<std::uint8_t> is_fetched(problem.states.size());
  GraphSplit best = priced(problem, layer, {}, is_fetched);
  std::int64_t best_count = 0;
  const auto most = std::min(static_cast<std::int64_t>(order.size()), problem.max_fetches);
  for (std::int64_t count = 1; count <= most; ++count) {
    is_fetched[order[count - 1]] = 1;
    const GraphSplit next = priced(problem, layer, all.first(count), is_fetched);
    if (std::max(next.gpu_seconds, next.cpu_seconds) >= std::max(best.gpu_seconds, best.cpu_seconds))
      continue;
    best = next;
    best_count = count;
  }
  best.fetch.assign(order.begin(), order.begin() + best_count);
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
