// The rules of tandem.policy.assignment.in_graph.
#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "decider/assignment.hpp"
#include "decider/sorting.hpp"

namespace tandem {
namespace {

struct Published {
  double held_seconds = 0.0;
  Positions absent, under_way;
  // For the CPU: experts under way that memory has, and those that pass through memory.
  Positions in_memory, coming;

  explicit Published(const LayerProblem& problem) {
    for (std::size_t i = 0; i < problem.wait.size(); ++i) {
      const double wait = problem.wait[i];
      if (wait == 0.0) {
        held_seconds += problem.gpu[i];
        continue;
      }
      const auto place = static_cast<std::int32_t>(i);
      if (wait > 0.0) under_way.push_back(place);
      if (!problem.places.empty() && problem.places[i] != Place::kInSlot)
        coming.push_back(place);
      else
        (wait > 0.0 ? in_memory : absent).push_back(place);
    }
  }

  Split split(Positions fetch, double gpu_seconds, double cpu_seconds) const {
    return {std::move(fetch), under_way, gpu_seconds, cpu_seconds};
  }
};

// Returns when the CPU has also computed the experts that are read; the others are done at `cpu`.
double with_reads(const LayerProblem& problem, const Published& layer, double cpu) {
  double end = 0.0;
  for (const std::int32_t i : layer.coming) {
    if (problem.is_on_disk(i)) {
      end += problem.read;
      cpu = std::max(cpu, end);
    }
    cpu += problem.cpu[i];
  }
  return cpu;
}

struct Price {
  double gpu, cpu;  // seconds

  double later() const { return std::max(gpu, cpu); }
};

// The second launch waits for the hits, for the CPU's share and for the last copy. `is_fetched` has
// the content of `fetch` by position, because a layer is priced once for each number of fetches.
Price priced(const LayerProblem& problem, const Published& layer,
             std::span<const std::int32_t> fetch, const std::vector<std::uint8_t>& is_fetched) {
  const bool is_cpu_used =
      !layer.in_memory.empty() || fetch.size() < layer.absent.size() || !layer.coming.empty();
  const double link = is_cpu_used ? problem.link : problem.link / problem.link_slowdown;
  double arrived = problem.link_busy;
  if (!fetch.empty()) arrived = std::max(arrived, problem.copy_wake);
  for (std::size_t i = 0; i < fetch.size(); ++i) arrived += link;
  Price found{layer.held_seconds, 0.0};
  if (is_cpu_used) {
    double cpu = added(problem.cpu, layer.in_memory);
    for (const std::int32_t i : layer.absent)
      if (is_fetched[i] == 0) cpu += problem.cpu[i];
    cpu += problem.cpu_first;
    cpu += (problem.cpu_slowdown - 1.0) * std::min(cpu, arrived);
    found.cpu = with_reads(problem, layer, cpu);
  }
  if (fetch.empty()) return found;
  found.gpu = std::max({found.gpu, found.cpu, arrived + problem.copy_wake});
  for (const std::int32_t i : fetch) found.gpu += problem.gpu[i];
  return found;
}

Split ready_on_gpu(const LayerProblem& problem) {
  const Published layer(problem);
  double cpu = 0.0;
  bool is_cpu_used = false;
  for (std::size_t i = 0; i < problem.wait.size(); ++i) {
    if (problem.wait[i] == 0.0) continue;
    is_cpu_used = true;
    if (problem.places.empty() || problem.places[i] == Place::kInSlot) cpu += problem.cpu[i];
  }
  if (is_cpu_used) cpu = with_reads(problem, layer, cpu + problem.cpu_first);
  return layer.split({}, layer.held_seconds, cpu);
}

Split balanced_in_graph(const LayerProblem& problem) {
  const Published layer(problem);
  Positions order = layer.absent;
  sort_by_cpu(problem, order);
  const std::span<const std::int32_t> all(order);
  std::vector<std::uint8_t> is_fetched(problem.wait.size());
  Price best = priced(problem, layer, {}, is_fetched);
  std::int64_t best_count = 0;
  const auto most = std::min(static_cast<std::int64_t>(order.size()), problem.max_fetches);
  for (std::int64_t count = 1; count <= most; ++count) {
    is_fetched[order[count - 1]] = 1;
    const Price next = priced(problem, layer, all.first(count), is_fetched);
    if (next.later() >= best.later()) continue;
    best = next;
    best_count = count;
  }
  order.resize(best_count);
  return layer.split(std::move(order), best.gpu, best.cpu);
}

Split dali_in_graph(const LayerProblem& problem) {
  const Published layer(problem);
  double on_gpu = layer.held_seconds;
  double on_cpu = with_reads(problem, layer, added(problem.cpu, layer.in_memory));
  std::vector<double> gpu = problem.gpu;
  for (double& seconds : gpu) seconds = std::max(seconds, problem.link);
  Positions order = layer.absent, fetch;
  sort_stably(order, [&](std::int32_t a, std::int32_t b) {
    return std::abs(gpu[a] - problem.cpu[a]) > std::abs(gpu[b] - problem.cpu[b]);
  });
  for (const std::int32_t i : order) {
    const bool is_full = static_cast<std::int64_t>(fetch.size()) >= problem.max_fetches;
    if (!is_full && on_gpu + gpu[i] <= on_cpu + problem.cpu[i]) {
      fetch.push_back(i);
      on_gpu += gpu[i];
    } else {
      on_cpu += problem.cpu[i];
    }
  }
  return layer.split(std::move(fetch), on_gpu, on_cpu);
}

}  // namespace

Split in_graph(Rule rule, const LayerProblem& problem) {
  switch (rule) {
    case Rule::kBalancedInGraph:
      return balanced_in_graph(problem);
    case Rule::kDaliInGraph:
      return dali_in_graph(problem);
    default:
      return ready_on_gpu(problem);
  }
}

}  // namespace tandem
