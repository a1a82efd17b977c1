#include "decider/entries.hpp"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

bool contains(const Ids& experts, std::int32_t expert) {
  return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

}  // namespace

Ids by_worth(Ids experts, const std::uint32_t* worth) {
  std::stable_sort(experts.begin(), experts.end(),
                   [&](std::int32_t a, std::int32_t b) { return worth[a] > worth[b]; });
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
  asking = by_worth(std::move(asking), layer.worth);
  std::erase_if(asking, [&](std::int32_t expert) {
    return !contains(fetched, expert) && !contains(staged, expert) && room-- <= 0;
  });
  return admit(layer, std::move(asking));
}

Admitted admit(const LayerSlots& layer, Ids asking) {
  asking = by_worth(std::move(asking), layer.worth);
  Admitted found;
  const auto free = static_cast<std::size_t>(layer.free_slots);
  for (std::size_t i = 0; i < asking.size() && i < free; ++i)
    found.emplace_back(asking[i], kNobody);
  if (asking.size() <= free) return found;
  Ids leaving;
  for (const std::int32_t expert : layer.members)
    if (layer.states[expert] == kReady && !contains(layer.experts, expert))
      leaving.push_back(expert);
  // A lone newcomer replaces the least worthy that came first, several the least by number.
  const auto is_less = [&](std::int32_t a, std::int32_t b) {
    return layer.worth[a] < layer.worth[b];
  };
  const std::size_t most = std::min(asking.size() - free, leaving.size());
  if (asking.size() - free == 1 && most == 1)
    std::iter_swap(leaving.begin(), std::min_element(leaving.begin(), leaving.end(), is_less));
  else
    std::partial_sort(
        leaving.begin(), leaving.begin() + static_cast<std::ptrdiff_t>(most), leaving.end(),
        [&](std::int32_t a, std::int32_t b) { return is_less(a, b) || (!is_less(b, a) && a < b); });
  for (std::size_t i = free; i < asking.size() && i - free < leaving.size(); ++i) {
    if (layer.worth[asking[i]] <= layer.worth[leaving[i - free]]) break;
    found.emplace_back(asking[i], leaving[i - free]);
  }
  return found;
}

}  // namespace tandem
