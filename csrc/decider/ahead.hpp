// Chooses the experts of later layers that are prefetched, and those that they replace, in
// planned and in captured steps. Decisions equal those of tandem.policy.ahead bit by bit; the
// reasons are explained there.
#pragma once

#include <cstdint>

#include "decider/assignment.hpp"
#include "decider/entries.hpp"
#include "decider/regression_predictor.hpp"

namespace tandem {

// A layer's load: experts in ascending order, and their tokens.
struct Load {
  Ids experts, tokens;
};

// A coming layer. Everything it references must outlive it.
struct ComingLayer {
  std::int32_t layer;
  const std::uint8_t* states;  // by expert: kEmpty, kCopying, kReady
  const Ids& late;  // experts fetched for one use whose copies have not ended
  double begin, needed_at;  // when the link is free for it, and when it is planned or published
  std::int64_t room;  // slots that it may use
  bool in_graph;  // only into clear slots, and only copies that end in time
};

struct AheadLimits {
  std::int64_t most = 0;  // limit of predicted prefetches for one layer
  double copy_price = 0.0;  // seconds that one copy costs CPU and device
};

// How many copies the link completes in this time.
std::int64_t whole_copies(double link, double seconds);

// The expected experts whose chance is high enough for a copy to pay, best first.
Ids expected_ahead(RegressionPredictor& predictor, const Costs& costs, const AheadLimits& limits,
                   const ComingLayer& coming);

// How often chances for prefetches came lately; same as tandem.policy.prefetch.Recurrence.
struct CopyChances {
  std::int64_t level;

  bool note_chance();
};

// Chooses which of `expected` get a slot of the layer, and whom they replace: free slots first,
// then residents that are less likely to be used. None before such chances have recurred.
Admitted over_residents(const Forecast& forecast, const Costs& costs, const AheadLimits& limits,
                        const LayerSlots& slots, const Ids& expected, CopyChances& chances);

// A known layer's absent experts, those with most tokens first, without those whose copy would cost
// more than the CPU.
Ids known_misses(const Costs& costs, const AheadLimits& limits, const Load& load,
                 const ComingLayer& coming);

// How many of a known layer's misses are prefetched: as many as arrive in time; in a planned step
// also those whose copy begins in time and ends before the CPU would have computed them.
std::size_t num_in_time(const Costs& costs, const Load& load, const Ids& misses,
                        const ComingLayer& coming);

}  // namespace tandem
