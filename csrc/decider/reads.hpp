// Decides what is read from a disk ahead of its use, and what may be lent from memory to a device.
// Decisions equal those of tandem.policy.reads bit by bit; the reasons are explained there.
// entries.hpp decides which experts get a slot in memory. There an expert that is lent has the
// state kCopying, so it stays.
#pragma once

#include <cstdint>
#include <vector>

#include "decider/entries.hpp"

namespace tandem {

// A layer whose next use is known. Everything it references must outlive it.
struct ComingUse {
  std::int32_t layer;
  const Ids& experts;
  const std::uint8_t* are_there;  // by expert: in memory, being read, or on a device
  std::int64_t free_slots;  // free slots of the layer
};

// Slots that experts of all layers pass through.
struct SharedSlots {
  std::int64_t all, free;
  std::int64_t expected;  // slots that hold, or are being filled with, what a coming use needs
};

struct ReadAhead {
  std::int32_t layer, expert;
  bool passes;  // into a shared slot, not one of its layer
};

// Returns the reads that begin now, in this order.
std::vector<ReadAhead> known_reads(const std::vector<ComingUse>& coming, SharedSlots shared);

// An absent expert that the next layer's router, run ahead, gave this rank for some token.
struct LikelyExpert {
  std::int32_t expert, rank;
};

// How often an absent expert of each rank was used, in 65,536ths.
using Chances = std::vector<std::int32_t>;
constexpr std::int32_t kCertain = 1 << 16, kFirstChance = kCertain / 2;

// Returns the likely experts that are read now, best rank first.
Ids likely_reads(const std::vector<LikelyExpert>& likely, const Chances& chances,
                 std::int64_t num_shared);

// Whether the next layer's router is run ahead in a step: some chance suffices for a read, or it is
// time to see whether chances have changed.
bool may_look_ahead(const Chances& chances, std::int64_t step);

// Tries now and then whether steps are faster with look-ahead, and keeps what is faster.
class LookAheadTrial {
 public:
  bool looks() const;  // whether the current step looks ahead
  // The current step took this time.
  void end_step(std::int64_t num_tokens, double seconds);

 private:
  void begin();

  bool is_better_ = true;
  std::int64_t num_tokens_ = 0, step_ = 0;
  std::vector<double> without_, with_;  // seconds
};

// Returns a chance after one more expert of its rank was used or not.
std::int32_t updated_chance(std::int32_t chance, bool was_used);

// Where memory has an expert, in the order of tandem.policy.reads: in a slot of its layer, in a
// shared slot for this use only, or not yet.
enum class Place : std::uint8_t { kInSlot, kPassing, kOnDisk };

// Whether a use with this many tokens is a prompt's, which reads nearly all experts of each layer.
bool is_prompt(std::int64_t num_tokens);

// At most `most` experts that a prompt's next layer probably uses and no device has, best first.
Ids prompt_reads(const std::uint8_t* on_device, const Scores& scores, std::size_t most);

// Makes experts that a device has the first to leave memory.
void rank_last(const std::uint8_t* on_device, Scores& scores);

// Whether one more of the shared slots may be lent to a copy, if `num_lent` are lent.
bool may_lend(std::int64_t num_lent, std::int64_t num_shared);

// Whether a copy may take one of `num_free` rooms.
bool may_take_room(std::int64_t num_free, bool waits);

}  // namespace tandem
