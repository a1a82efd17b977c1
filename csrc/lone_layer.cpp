#include "lone_layer.hpp"

#include <algorithm>
#include <limits>

namespace tandem {
namespace {

bool contains(const Ids& experts, std::int32_t expert) {
  return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

// Seconds if `count` experts are on the CPU, while the link is busy for so long.
double cpu_seconds(const LoneTerms& terms, std::int64_t count, double link_seconds) {
  if (count == 0) return 0.0;
  const double alone = static_cast<double>(count) * terms.cpu + terms.cpu_first;
  return alone + (terms.cpu_slowdown - 1.0) * std::min(alone, link_seconds);
}

// Seconds if the device takes all experts: copies are then as fast as the link alone.
double device_seconds(const LoneTerms& terms, const LoneLayer& layer, std::int64_t num_absent) {
  const double link = terms.link / terms.link_slowdown;
  double done = 0.0;
  for (std::int64_t fetch = 1; fetch <= num_absent; ++fetch)
    done = std::max(done, layer.link_busy + static_cast<double>(fetch) * link) + terms.gpu;
  return std::max(static_cast<double>(layer.experts.size()) * terms.gpu, done);
}

// The best number of fetches with the best number of spills; all experts cost the same.
void assign(const LoneTerms& terms, const LoneLayer& layer, const Ids& absent, const Ids& resident,
            LoneDecision& out) {
  const auto last = static_cast<std::int64_t>(resident.size());
  const auto num_absent = static_cast<std::int64_t>(absent.size());
  double best = std::numeric_limits<double>::infinity(), arrived = 0.0;
  std::int64_t best_fetch = 0, best_spill = 0, spill = 0;
  for (std::int64_t fetch = 0; fetch <= std::min(num_absent, terms.max_fetches); ++fetch) {
    if (fetch > 0) {
      const double copied = layer.link_busy + static_cast<double>(fetch) * terms.link;
      arrived = std::max(arrived, copied) + terms.gpu;
      if (arrived >= best) break;
    }
    while (true) {
      const double on_gpu = std::max(static_cast<double>(last - spill) * terms.gpu +
                                         static_cast<double>(fetch) * terms.gpu,
                                     arrived);
      const double on_cpu =
          cpu_seconds(terms, num_absent - fetch + spill,
                      layer.link_busy + static_cast<double>(fetch) * terms.link);
      if (std::max(on_gpu, on_cpu) < best) {
        best = std::max(on_gpu, on_cpu);
        best_fetch = fetch, best_spill = spill;
        out.gpu_seconds = on_gpu, out.cpu_seconds = on_cpu;
      }
      if (on_cpu >= on_gpu || spill == last) break;
      ++spill;
    }
    spill -= spill > 0;
  }
  if (terms.link_slowdown > 1.0 && num_absent <= terms.max_fetches) {
    const double seconds = device_seconds(terms, layer, num_absent);
    if (seconds < best) {
      best = seconds, best_fetch = num_absent, best_spill = 0;
      out.gpu_seconds = seconds, out.cpu_seconds = 0.0;
    }
  }
  const double all_on_cpu = layer.all_on_cpu + terms.cpu_first;
  if (terms.never_worse_than_cpu && all_on_cpu < best) {
    out.spill = resident;
    out.gpu_seconds = 0.0, out.cpu_seconds = all_on_cpu;
    return;
  }
  out.fetch = absent;
  std::stable_sort(out.fetch.begin(), out.fetch.end(), [&](std::int32_t a, std::int32_t b) {
    return layer.worth[a] > layer.worth[b];
  });
  out.fetch.resize(best_fetch);
  out.spill.assign(resident.begin(), resident.begin() + best_spill);
}

}  // namespace

std::int64_t idle_copies(double link, double link_busy, double now, double next_plan) {
  if (link == 0.0) return static_cast<std::int64_t>(kUnlimitedCopies);
  const double idle = std::min((next_plan - now - link_busy) / link, kUnlimitedCopies);
  return std::max<std::int64_t>(static_cast<std::int64_t>(idle), link_busy == 0.0);
}

Ids newcomers(Ids asking, const std::uint32_t* worth, std::int64_t room, const Ids& first) {
  std::stable_sort(asking.begin(), asking.end(),
                   [&](std::int32_t a, std::int32_t b) { return worth[a] > worth[b]; });
  std::erase_if(asking,
                [&](std::int32_t expert) { return !contains(first, expert) && room-- <= 0; });
  return asking;
}

Admitted admit(const LoneLayer& layer, const Ids& wanted) {
  Admitted found;
  const auto free = static_cast<std::size_t>(layer.free_slots);
  for (std::size_t i = 0; i < wanted.size() && i < free; ++i)
    found.emplace_back(wanted[i], kNobody);
  if (wanted.size() <= free) return found;
  Ids leaving;
  for (const std::int32_t expert : layer.members)
    if (layer.states[expert] == kReady && !contains(layer.experts, expert))
      leaving.push_back(expert);
  // A lone newcomer replaces the least worthy that came first, several the least by number.
  const bool is_alone = wanted.size() - free == 1;
  std::stable_sort(leaving.begin(), leaving.end(), [&](std::int32_t a, std::int32_t b) {
    const std::uint32_t x = layer.worth[a], y = layer.worth[b];
    return x < y || (x == y && !is_alone && a < b);
  });
  for (std::size_t i = free; i < wanted.size() && i - free < leaving.size(); ++i) {
    if (layer.worth[wanted[i]] <= layer.worth[leaving[i - free]]) break;
    found.emplace_back(wanted[i], leaving[i - free]);
  }
  return found;
}

LoneDecision decide(const LoneTerms& terms, const LoneLayer& layer) {
  Ids absent, resident;
  for (const std::int32_t expert : layer.experts)
    (layer.states[expert] == kReady ? resident : absent).push_back(expert);
  LoneDecision out{};
  assign(terms, layer, absent, resident, out);
  const double next_plan = layer.now + std::max(out.gpu_seconds, out.cpu_seconds) + layer.dense;
  const std::int64_t room = idle_copies(terms.link, layer.link_busy, layer.now, next_plan) -
                            static_cast<std::int64_t>(out.fetch.size());
  out.admitted = admit(layer, newcomers(std::move(absent), layer.worth, room, out.fetch));
  return out;
}

}  // namespace tandem
