// What is read of a disk ahead of its use, and what of memory may be lent to a device: the disk's tier
// as tandem.policy.reads decides about it, to the last bit; see there for the reasons. Who gets a slot
// in memory, and who leaves for it, is in entries.hpp: an expert that is lent is kCopying there, and
// stays.
#pragma once

#include <cstdint>
#include <vector>

#include "decider/entries.hpp"

namespace tandem {

// A layer whose next use is known; what it names outlives it.
struct ComingUse {
  std::int32_t layer;
  const Ids& experts;
  const std::uint8_t* are_there;  // by expert: in memory, being read, or on a device
  std::int64_t free_slots;  // of the layer
};

// Slots that experts of all layers pass through.
struct SharedSlots {
  std::int64_t all, free;
  std::int64_t expected;  // that have what a coming use wants, or are being read into for it
};

struct ReadAhead {
  std::int32_t layer, expert;
  bool passes;  // through a shared slot; else it gets one of its layer
};

// What is read now, in this order.
std::vector<ReadAhead> known_reads(const std::vector<ComingUse>& coming, SharedSlots shared);

// Where memory has an expert, in the order of tandem.policy.reads: in a slot of its layer, in a shared
// one, which is its only for this use, or not yet.
enum class Place : std::uint8_t { kInSlot, kPassing, kOnDisk };

// Whether so many tokens of a use are a prompt's, which reads nearly all experts of each layer.
bool is_prompt(std::int64_t num_tokens);

// A prompt's next layer: all that no device has, best first.
Ids prompt_reads(const std::uint8_t* on_device, const Scores& scores);

// What a device has is the first to leave memory.
void rank_last(const std::uint8_t* on_device, Scores& scores);

// Whether one more of the shared slots may be lent to a copy, so many being lent.
bool may_lend(std::int64_t num_lent, std::int64_t num_shared);

// Whether a copy may take one of so many free rooms.
bool may_take_room(std::int64_t num_free, bool waits);

}  // namespace tandem
