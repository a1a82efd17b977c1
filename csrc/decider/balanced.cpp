// tandem.policy.assignment.balanced: every number of fetches with every number of spills.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "decider/assignment.hpp"

namespace tandem {
namespace {

using Seconds = std::vector<double>;

// When experts that arrive at these times are done, if the GPU computes nothing else.
double one_after_another(const std::vector<std::pair<double, double>>& arrivals) {
  double done = 0.0;
  for (const auto& [arrival, seconds] : arrivals) done = std::max(done, arrival) + seconds;
  return done;
}

// Those with a slot, first spilled first, and by number of spills: what is left to the GPU.
struct Residents {
  Positions order;
  Seconds left, floor;  // GPU seconds; the end of arrivals
  Seconds spilled;      // CPU seconds

  Residents(const LayerProblem& problem, Positions resident) : order(std::move(resident)) {
    const auto cpu_over_gpu = [&](std::int32_t i) {
      const double held = std::max(problem.wait[i], problem.gpu[i]);
      return held != 0.0 ? problem.cpu[i] / held : 1e99;
    };
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return cpu_over_gpu(a) < cpu_over_gpu(b);
    });
    left = floor = spilled = {0.0};
    std::vector<std::pair<double, double>> under_way;  // arrival, GPU seconds
    for (auto i = order.rbegin(); i != order.rend(); ++i) {
      left.push_back(left.back() + problem.gpu[*i]);
      if (problem.wait[*i] != 0.0) {
        const std::pair found(problem.wait[*i], problem.gpu[*i]);
        under_way.insert(std::upper_bound(under_way.begin(), under_way.end(), found), found);
        floor.push_back(one_after_another(under_way));
      } else {
        floor.push_back(floor.back());
      }
    }
    std::reverse(left.begin(), left.end());
    std::reverse(floor.begin(), floor.end());
    for (const std::int32_t i : order) spilled.push_back(spilled.back() + problem.cpu[i]);
  }
};

// By number of fetches: GPU seconds of the fetched, and when the last of them is done.
struct Fetches {
  Seconds total{0.0}, done{0.0};

  Fetches(const LayerProblem& problem, const Positions& absent, double link) {
    const auto limit = std::min(static_cast<std::int64_t>(absent.size()), problem.max_fetches);
    for (std::int64_t count = 1; count <= limit; ++count) {
      const double seconds = problem.gpu[absent[count - 1]];
      const double arrived = problem.link_busy + static_cast<double>(count) * link;
      done.push_back(std::max(arrived, done.back()) + seconds);
      total.push_back(total.back() + seconds);
    }
  }
};

struct Pair {
  std::size_t fetch, spill;
  double gpu_seconds, cpu_seconds;
};

// The pair with the least maximum of both times.
Pair best_pair(const LayerProblem& problem, const Positions& absent, const Fetches& fetches,
               const Residents& residents) {
  const std::size_t last = residents.order.size();
  double left = added(problem.cpu, absent), least = std::numeric_limits<double>::infinity();
  Pair best{0, last, 0.0, left + residents.spilled[last] + problem.cpu_first};
  for (std::size_t fetch = 0, spill = 0; fetch < fetches.total.size(); ++fetch) {
    if (fetch > 0) left -= problem.cpu[absent[fetch - 1]];
    if (fetch == absent.size()) left = 0.0;
    while (true) {
      const double held = std::max(residents.left[spill], residents.floor[spill]);
      const double gpu = std::max(held + fetches.total[fetch], fetches.done[fetch]);
      const bool is_cpu_used = spill > 0 || fetch < absent.size();
      double cpu = is_cpu_used ? left + residents.spilled[spill] + problem.cpu_first : 0.0;
      const double copying = problem.link_busy + static_cast<double>(fetch) * problem.link;
      cpu += (problem.cpu_slowdown - 1.0) * std::min(cpu, copying);
      if (std::max(gpu, cpu) < least) {
        least = std::max(gpu, cpu);
        best = {fetch, spill, gpu, cpu};
      }
      if (cpu >= gpu || spill == last) break;
      ++spill;
    }
    spill -= spill > 0;
    if (fetches.total[fetch] >= least || fetches.done[fetch] >= least) break;
  }
  return best;
}

}  // namespace

Split balanced(const LayerProblem& problem) {
  Positions absent, resident;
  for (std::size_t i = 0; i < problem.wait.size(); ++i)
    (problem.wait[i] < 0.0 ? absent : resident).push_back(static_cast<std::int32_t>(i));
  sort_by_cpu(problem, absent);
  const Fetches fetches(problem, absent, problem.link);
  const Residents residents(problem, std::move(resident));
  Pair best = best_pair(problem, absent, fetches, residents);
  if (problem.link_slowdown > 1.0 && fetches.total.size() > absent.size()) {
    // Without the CPU copies are as fast as the link alone.
    const Fetches alone(problem, absent, problem.link / problem.link_slowdown);
    const double held = std::max(residents.left[0], residents.floor[0]) + alone.total.back();
    const double everything = std::max(held, alone.done.back());
    if (everything < std::max(best.gpu_seconds, best.cpu_seconds))
      best = {absent.size(), 0, everything, 0.0};
  }
  absent.resize(best.fetch);
  return {
      std::move(absent),
      {residents.order.begin(), residents.order.begin() + static_cast<std::ptrdiff_t>(best.spill)},
      best.gpu_seconds,
      best.cpu_seconds};
}

}  // namespace tandem
