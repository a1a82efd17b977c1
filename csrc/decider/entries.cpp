#include "decider/entries.hpp"

#include <algorithm>
#include <utility>

#include "decider/sorting.hpp"

namespace tandem {
namespace {

bool contains(const Ids& experts, std::int32_t expert) {
  return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

// Returns the experts that leave first, at most `most`: those with the lowest scores; if equal,
// those with the lowest number, or those that came first (`by_number` false). Whether an expert may
// leave is checked only for these few.
Ids lowest(const LayerSlots& layer, std::size_t most, bool by_number) {
  Ids found;
  if (most == 0) return found;
  found.reserve(most + 1);
  const auto is_before = [&](std::int32_t a, std::int32_t b) {
    return layer.scores[a] < layer.scores[b] ||
           (by_number && layer.scores[a] == layer.scores[b] && a < b);
  };
  for (const std::int32_t expert : layer.members) {
    if (found.size() == most && !is_before(expert, found.back())) continue;
    if (layer.states[expert] != kReady || contains(layer.experts, expert)) continue;
    found.insert(std::upper_bound(found.begin(), found.end(), expert, is_before), expert);
    if (found.size() > most) found.pop_back();
  }
  return found;
}

// `asking` is sorted, best first.
Admitted pairs(const LayerSlots& layer, const Ids& asking) {
  Admitted found;
  const auto free = static_cast<std::size_t>(layer.free_slots);
  for (std::size_t i = 0; i < asking.size() && i < free; ++i) found.emplace_back(asking[i], kNone);
  if (asking.size() <= free) return found;
  const std::size_t most = asking.size() - free;
  const Ids leaving = lowest(layer, most, most > 1);
  for (std::size_t i = 0; i < leaving.size(); ++i) {
    if (layer.scores[asking[free + i]] <= layer.scores[leaving[i]]) break;
    found.emplace_back(asking[free + i], leaving[i]);
  }
  return found;
}

}  // namespace

Admitted over_lowest(const LayerSlots& layer, const Ids& entering) {
  Admitted found;
  const auto free = static_cast<std::size_t>(layer.free_slots);
  for (std::size_t i = 0; i < entering.size() && i < free; ++i)
    found.emplace_back(entering[i], kNone);
  if (entering.size() <= free) return found;
  const Ids leaving = lowest(layer, entering.size() - free, true);
  for (std::size_t i = 0; i < leaving.size(); ++i)
    found.emplace_back(entering[free + i], leaving[i]);
  return found;
}

Ids by_score(Ids experts, const std::uint32_t* scores) {
  sort_stably(experts, [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
  return experts;
}

std::int64_t idle_copies(double link, double link_busy, double now, double next_plan) {
  if (link == 0.0) return static_cast<std::int64_t>(kUnlimitedCopies);
  const double idle = std::min((next_plan - now - link_busy) / link, kUnlimitedCopies);
  return std::max<std::int64_t>(static_cast<std::int64_t>(idle), link_busy == 0.0);
}

Admitted entries(const LayerSlots& layer, const Ids& staged, const Ids& fetched,
                 std::int64_t room) {
  Ids asking;
  for (const std::int32_t expert : layer.experts)
    if (layer.states[expert] == kEmpty || contains(staged, expert)) asking.push_back(expert);
  asking = by_score(std::move(asking), layer.scores);
  Ids granted;
  for (const std::int32_t expert : asking)
    if (contains(fetched, expert) || contains(staged, expert) || room-- > 0)
      granted.push_back(expert);
  return pairs(layer, granted);
}

Admitted admit(const LayerSlots& layer, Ids asking) {
  return pairs(layer, by_score(std::move(asking), layer.scores));
}

}  // namespace tandem
