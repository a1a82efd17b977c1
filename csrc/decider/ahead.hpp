// Which experts of layers to come are copied ahead, and who leaves for them: in planned steps and in
// captured ones. The same as tandem.policy.ahead decides, to the last bit; see there for the reasons.
#pragma once

#include <cstdint>

#include "decider/assignment.hpp"
#include "decider/entries.hpp"
#include "decider/regression_predictor.hpp"

namespace tandem {

// What a layer uses: experts in ascending order with their tokens.
struct Load {
  Ids experts, tokens;
};

// A layer to come; what it names outlives it.
struct ComingLayer {
  std::int32_t layer;
  const std::uint8_t* states;  // by expert: kEmpty, kCopying, kReady
  const Ids& late;  // experts that were fetched for one use, and whose copies have not ended
  double begin, needed_at;  // when the link is free for it; when it is planned or published
  std::int64_t room;  // slots that it may take
  bool in_graph;  // clear slots alone, and copies that come in time alone
};

struct AheadLimits {
  std::int64_t most = 0;  // copies ahead of one layer that are predicted
  double copy_price = 0.0;  // seconds that one copy costs CPU and device
};

// How many copies the link carries in so many seconds.
std::int64_t whole_copies(double link, double seconds);

// Those that are expected for so sure that copies pay, best first.
Ids expected_ahead(RegressionPredictor& predictor, const Costs& costs, const AheadLimits& limits,
                   const ComingLayer& coming);

// How often chances for copies ahead have come lately; as tandem.policy.prefetch.Recurrence.
struct CopyChances {
  std::int64_t level;

  bool note_chance();
};

// Of these, who takes a slot of the layer, and who leaves for it: free ones first, then those of
// residents that are less likely to be used; none before such chances have recurred.
Admitted over_residents(const Forecast& forecast, const Costs& costs, const AheadLimits& limits,
                        const LayerSlots& slots, const Ids& expected, CopyChances& chances);

// A known layer's absent experts, those of most tokens first; none that a copy would cost more than the
// CPU.
Ids known_misses(const Costs& costs, const AheadLimits& limits, const Load& load,
                 const ComingLayer& coming);

// How many of a known layer's misses are copied ahead of it: as many as come in time; in a planned step
// those, too, that begin in time and come sooner than the CPU would have them.
std::size_t num_in_time(const Costs& costs, const Load& load, const Ids& misses,
                        const ComingLayer& coming);

}  // namespace tandem
