// Sorts the few experts of a layer without allocating memory, for decisions that a device waits
// for.
#pragma once

#include <algorithm>
#include <cstdint>

#include "policy_tables.hpp"

namespace tandem {

constexpr std::size_t kFew = 24;  // for more, insertion takes longer

// Like std::stable_sort, which allocates memory even for a few elements.
template <typename Less>
void sort_stably(Ids& ids, const Less& is_before) {
  if (ids.size() > kFew) return std::stable_sort(ids.begin(), ids.end(), is_before);
  for (std::size_t i = 1; i < ids.size(); ++i) {
    const std::int32_t one = ids[i];
    std::size_t at = i;
    for (; at > 0 && is_before(one, ids[at - 1]); --at) ids[at] = ids[at - 1];
    ids[at] = one;
  }
}

}  // namespace tandem
