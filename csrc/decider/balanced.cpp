// tandem.policy.assignment.balanced: tries every number of fetches with every number of spills.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "decider/assignment.hpp"

namespace tandem {
namespace {

using Seconds = std::vector<double>;
constexpr double kForever = std::numeric_limits<double>::infinity();

// When experts that arrive at these times are computed, if the GPU computes nothing else.
double one_after_another(const std::vector<std::pair<double, double>>& arrivals) {
  double done = 0.0;
  for (const auto& [arrival, seconds] : arrivals) done = std::max(done, arrival) + seconds;
  return done;
}

// Experts with a slot, in the order in which they are spilled. By number of spills: the GPU's
// remaining time, and the CPU's, up to the first expert that memory lacks.
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
      const bool waits = problem.is_on_disk(a);
      if (waits != problem.is_on_disk(b)) return !waits;
      return cpu_over_gpu(a) < cpu_over_gpu(b);
    });
    left = floor = spilled = {0.0};
    std::vector<std::pair<double, double>> under_way;  // (arrival, GPU seconds)
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
    for (const std::int32_t i : order) {
      if (problem.is_on_disk(i)) break;
      spilled.push_back(spilled.back() + problem.cpu[i]);
    }
  }
};

// By number of fetches: GPU seconds of the fetched experts, and when the last of them is computed.
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

// What reads from a disk add to a layer if `fetch` of the experts that it reads are fetched. The
// CPU's are read before them.
struct Read {
  std::size_t fetch;
  bool is_cpus;  // whether the CPU computes any of them
  AsRead on_cpu;
  double gpu_seconds = 0.0;
  // Time from the end of other copies until the last is done, if reads are early.
  double after_link = -kForever;
  double after_reads = -kForever;  // when the last is done, if there are no other copies

  Read(const LayerProblem& problem, std::span<const std::int32_t> on_disk, std::size_t num_fetched,
       double link)
      : fetch(num_fetched),
        is_cpus(num_fetched < on_disk.size()),
        on_cpu(problem, on_disk.subspan(num_fetched)) {
    double end = 0.0, copied = 0.0;
    for (std::size_t i = fetch; i < on_disk.size(); ++i) end += problem.read;
    double arrived = end;
    for (const std::int32_t i : on_disk.first(fetch)) {
      const double seconds = problem.gpu[i];
      end += problem.read;
      copied += link;
      arrived = std::max(arrived, end) + link;
      after_link = std::max(after_link, copied) + seconds;
      after_reads = std::max(after_reads, arrived) + seconds;
      gpu_seconds += seconds;
    }
  }

  // Returns when the last fetched expert is computed if `others` are copied first and computed at
  // `done`.
  double copied(const LayerProblem& problem, double link, std::size_t others, double done) const {
    const double busy = problem.link_busy + static_cast<double>(others) * link;
    return std::max({done + gpu_seconds, busy + after_link, after_reads});
  }
};

struct Pair {
  std::size_t fetch, read, spill;
  double gpu_seconds, cpu_seconds;

  double later() const { return std::max(gpu_seconds, cpu_seconds); }
};

// The pair for which the later of both times is least, with these reads.
Pair best_pair(const LayerProblem& problem, const Positions& absent, const Fetches& fetches,
               const Residents& residents, const Read& read) {
  const std::size_t last = residents.spilled.size() - 1;
  const auto room = problem.max_fetches - static_cast<std::int64_t>(read.fetch);
  double left = added(problem.cpu, absent), least = kForever;
  Pair best{};
  for (std::size_t fetch = 0, spill = 0;
       fetch < fetches.total.size() && static_cast<std::int64_t>(fetch) <= room; ++fetch) {
    if (fetch > 0) left -= problem.cpu[absent[fetch - 1]];
    if (fetch == absent.size()) left = 0.0;
    const double total = fetches.total[fetch] + read.gpu_seconds;
    const double arrival = read.copied(problem, problem.link, fetch, fetches.done[fetch]);
    while (true) {
      const double held = std::max(residents.left[spill], residents.floor[spill]);
      const double gpu = std::max(held + total, arrival);
      const bool is_cpu_used = spill > 0 || fetch < absent.size() || read.is_cpus;
      double cpu = is_cpu_used ? left + residents.spilled[spill] + problem.cpu_first : 0.0;
      const auto copies = static_cast<double>(fetch + read.fetch);
      const double copying = problem.link_busy + copies * problem.link;
      cpu += (problem.cpu_slowdown - 1.0) * std::min(cpu, copying);
      cpu = std::max(cpu + read.on_cpu.seconds, read.on_cpu.done);
      if (std::max(gpu, cpu) < least) {
        least = std::max(gpu, cpu);
        best = {fetch, read.fetch, spill, gpu, cpu};
      }
      if (cpu >= gpu || spill == last) break;
      ++spill;
    }
    spill -= spill > 0;
    if (total >= least || arrival >= least) break;
  }
  return best;
}

}  // namespace

Split balanced(const LayerProblem& problem) {
  Positions absent, on_disk, resident;
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(problem.wait.size()); ++i) {
    if (problem.wait[i] >= 0.0)
      resident.push_back(i);
    else
      (problem.is_on_disk(i) ? on_disk : absent).push_back(i);
  }
  sort_by_cpu(problem, absent);
  sort_by_cpu(problem, on_disk);
  const std::size_t num_absent = absent.size() + on_disk.size();
  const Fetches fetches(problem, absent, problem.link);
  const Residents residents(problem, std::move(resident));
  Pair best = best_pair(problem, absent, fetches, residents, {problem, on_disk, 0, problem.link});
  const auto most = std::min(static_cast<std::int64_t>(on_disk.size()), problem.max_fetches);
  for (std::int64_t count = 1; count <= most; ++count) {
    const Read read(problem, on_disk, count, problem.link);
    const Pair found = best_pair(problem, absent, fetches, residents, read);
    if (found.later() < best.later()) best = found;
  }
  if (problem.link_slowdown > 1.0 && problem.max_fetches >= static_cast<std::int64_t>(num_absent)) {
    // If the CPU computes nothing, copies are not slowed down.
    const double link = problem.link / problem.link_slowdown;
    const Fetches alone(problem, absent, link);
    const Read read(problem, on_disk, on_disk.size(), link);
    const double held = std::max(residents.left[0], residents.floor[0]) + alone.total.back();
    const double copied = read.copied(problem, link, absent.size(), alone.done.back());
    const double everything = std::max(held + read.gpu_seconds, copied);
    if (everything < best.later()) best = {absent.size(), on_disk.size(), 0, everything, 0.0};
  }
  absent.resize(best.fetch);
  absent.insert(absent.end(), on_disk.begin(),
                on_disk.begin() + static_cast<std::ptrdiff_t>(best.read));
  return {
      std::move(absent),
      {residents.order.begin(), residents.order.begin() + static_cast<std::ptrdiff_t>(best.spill)},
      best.gpu_seconds,
      best.cpu_seconds};
}

}  // namespace tandem
