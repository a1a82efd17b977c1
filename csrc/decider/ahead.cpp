#include "decider/ahead.hpp"

#include <algorithm>
#include <optional>

namespace tandem {
namespace {

// Same as in tandem.policy.prefetch.
constexpr std::int64_t kLayersPerChance = 512;
constexpr std::int64_t kFull = 16 * kLayersPerChance, kEnough = 8 * kLayersPerChance;

bool contains(const Ids& experts, std::int32_t expert) {
  return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

double cpu_seconds_of(const Costs& costs, const Load& load, std::int32_t expert) {
  const auto at = std::find(load.experts.begin(), load.experts.end(), expert);
  return seconds_of(costs.cpu, load.tokens[at - load.experts.begin()]);
}

// If the layer's router was run ahead, a copy may end after the layer begins, provided the CPU
// would take even longer.
std::int64_t copies_in_time(const RegressionPredictor& predictor, const Costs& costs,
                            const ComingLayer& coming) {
  const double idle = coming.needed_at - coming.begin;
  const std::int64_t whole = whole_copies(costs.link, idle);
  if (whole != 0 || coming.in_graph || idle <= 0.0) return whole;
  return costs.link - idle < costs.cpu[1] && predictor.is_hinted(coming.layer);
}

}  // namespace

std::int64_t whole_copies(double link, double seconds) {
  const double copies = link == 0.0 ? kUnlimitedCopies : std::min(seconds / link, kUnlimitedCopies);
  return static_cast<std::int64_t>(copies);
}

bool CopyChances::note_chance() {
  level = std::min(level + kLayersPerChance, kFull);
  return level >= kEnough;
}

Ids expected_ahead(RegressionPredictor& predictor, const Costs& costs, const AheadLimits& limits,
                   const ComingLayer& coming) {
  const std::int64_t most =
      std::min({limits.most, coming.room, copies_in_time(predictor, costs, coming)});
  const double gain = costs.cpu[1];
  if (most <= 0 || gain <= 0.0) return {};
  const double least = limits.copy_price / gain;
  if (!predictor.may_exceed(coming.layer, least)) return {};
  Ids found = predictor.forecast(coming.layer)->best(coming.states, most, least);
  std::erase_if(found, [&](std::int32_t expert) { return contains(coming.late, expert); });
  return found;
}

Admitted over_residents(const Forecast& forecast, const Costs& costs, const AheadLimits& limits,
                        const LayerSlots& slots, const Ids& expected, CopyChances& chances) {
  Admitted found;
  Ids asking = expected;
  auto free = slots.free_slots;
  while (!asking.empty() && free > 0) {
    if (chances.note_chance()) {
      found.emplace_back(asking.front(), kNone);
      --free;
    }
    asking.erase(asking.begin());
  }
  LayerSlots full = slots;
  full.free_slots = 0;
  for (const auto& [entering, victim] : over_lowest(full, asking)) {
    const double more = forecast.chance(entering) - forecast.chance(victim);
    if (more * costs.cpu[1] > limits.copy_price && chances.note_chance())
      found.emplace_back(entering, victim);
  }
  return found;
}

Ids known_misses(const Costs& costs, const AheadLimits& limits, const Load& load,
                 const ComingLayer& coming) {
  Positions order(load.experts.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return load.tokens[a] > load.tokens[b]; });
  Ids misses;
  for (const std::int32_t i : order) {
    const std::int32_t expert = load.experts[i];
    if (coming.states[expert] != kEmpty || contains(coming.late, expert)) continue;
    if (seconds_of(costs.cpu, load.tokens[i]) <= limits.copy_price) break;
    misses.push_back(expert);
  }
  return misses;
}

std::size_t num_in_time(const Costs& costs, const Load& load, const Ids& misses,
                        const ComingLayer& coming) {
  const std::int64_t whole = whole_copies(costs.link, coming.needed_at - coming.begin);
  double begin = coming.begin;
  std::size_t count = 0;
  for (; count < misses.size() && static_cast<std::int64_t>(count) < coming.room; ++count) {
    if (coming.in_graph) {
      if (static_cast<std::int64_t>(count) >= whole) break;
    } else if (begin >= coming.needed_at || begin + costs.link - coming.needed_at >=
                                                cpu_seconds_of(costs, load, misses[count])) {
      break;
    }
    begin += costs.link;
  }
  return count;
}

}  // namespace tandem
