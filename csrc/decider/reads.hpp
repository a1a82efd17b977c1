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
