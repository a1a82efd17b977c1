#include "decider/entries.hpp"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

bool contains(const Ids& experts, std::int32_t expert) {
  return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

// Those that may leave, in the order in which they came.
Ids evictable(const LayerSlots& layer) {
  Ids found;
  for (const std::int32_t expert : layer.members)
    if (layer.states[expert] == kReady && !contains(layer.experts, expert)) found.push_back(expert);
  return found;
}

// `asking` is sorted, best first.
Admitted pairs(const LayerSlots& layer, const Ids& asking) {
  Admitted found;
  const auto free = static_cast<std::size_t>(layer.free_slots);
  for (std::size_t i = 0; i < asking.size() && i < free; ++i)
    found.emplace_back(asking[i], kNobody);
  if (asking.size() <= free) return found;
  Ids leaving = evictable(layer);
  // One expert that enters replaces the lowest that came first, several the lowest by number.
  const auto is_less = [&](std::int32_t a, std::int32_t b) {
    return layer.scores[a] < layer.scores[b];
  };
  const std::size_t most = std::min(asking.size() - free, leaving.size());
  if (asking.size() - free == 1 && most == 1)
    std::iter_swap(leaving.begin(), std::min_element(leaving.begin(), leaving.end(), is_less));
  else
    std::partial_sort(
        leaving.begin(), leaving.begin() + static_cast<std::ptrdiff_t>(most), leaving.end(),
        [&](std::int32_t a, std::int32_t b) { return is_less(a, b) || (!is_less(b, a) && a < b); });
  for (std::size_t i = free; i < asking.size() && i - free < leaving.size(); ++i) {
    if (layer.scores[asking[i]] <= layer.scores[leaving[i - free]]) break;
    found.emplace_back(asking[i], leaving[i - free]);
  }
  return found;
}

}  // namespace

Admitted over_lowest(const LayerSlots& layer, const Ids& entering) {
  Admitted found;
  const auto free = static_cast<std::size_t>(layer.free_slots);
  for (std::size_t i = 0; i < entering.size() && i < free; ++i)
    found.emplace_back(entering[i], kNobody);
  if (entering.size() <= free) return found;
  Ids leaving = evictable(layer);
  std::sort(leaving.begin(), leaving.end(), [&](std::int32_t a, std::int32_t b) {
    return layer.scores[a] < layer.scores[b] || (layer.scores[a] == layer.scores[b] && a < b);
  });
  for (std::size_t i = free; i < entering.size() && i - free < leaving.size(); ++i)
    found.emplace_back(entering[i], leaving[i - free]);
  return found;
}

Ids by_score(Ids experts, const std::uint32_t* scores) {
  std::stable_sort(experts.begin(), experts.end(),
                   [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
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
