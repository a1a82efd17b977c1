// The interface between a captured decode step and the host, in memory that both see. There is one
// mailbox for each number of tokens (of any sequences) that a step may have.
//
// A layer's block; each part is aligned to 64 bytes:
//
//   doorbell  u32                   the device sets it to 1 after publishing, the host resets it
//   done      u32                   1: the device may go on; 0 from publishing until then
//   error     u32                   not 0: the step is lost; set by the host before `done`
//   guessed   u32                   1: `guess` is valid; set by the device, reset between steps
//   choice    i32 (tokens, top_k)   the router's; outside 0..num_experts-1 is padding
//   is_hit    i32 (tokens, top_k)   1: the device computes it, or it is padding; 0: the host does
//   weights   f32 (tokens, top_k)   the router's, for policies that read them
//   fetched   u64 (tokens, top_k)   address of a miss that the host has meanwhile copied; 0: the
//                                   host has computed it. Not read if nothing is ever fetched
//   guess     i32 (tokens, top_k)   the next layer's choice if its router ran now; outside
//                                   0..num_experts-1 is padding. Written in steps that ask for it
//
// After the blocks of all layers, shared by them:
//
//   hidden    (tokens, hidden_size) in the model's type; need not be written if nothing misses
//   results   f32 (tokens * top_k, hidden_size)   of the misses, not weighted
//
// Order. The device: choice, is_hit, weights, hidden, done = 0 (1 if nothing misses) ->
// doorbell = 1 -> its hits -> waits for done == 1 -> reads the results -> may publish the next
// layer. The host: takes the doorbell (acquire), reads, writes fetched and the results of all other
// misses -> done = 1 (release). The device reads fetched after its wait, and computes those experts
// before it reads results. If nothing misses, the host never writes `done` or fetched.
//
// These are flags and not counters, because operations of a captured graph contain constants.
// Between steps all doorbells and errors are 0, and all blocks have been read. At any time after
// the doorbell: guess -> guessed = 1. The host waits for it only briefly, and only prefetches
// depend on it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "values.hpp"

namespace tandem {

struct MailboxLayout {
  std::int64_t num_layers, num_rows, top_k, hidden_size;
  ValueType type;

  static constexpr std::int64_t kLineBytes = 64;
  static constexpr std::int64_t kDoorbell = 0, kDone = kLineBytes, kError = 2 * kLineBytes;
  static constexpr std::int64_t kGuessed = 3 * kLineBytes, kChoice = 4 * kLineBytes;

  std::int64_t pairs() const { return num_rows * top_k; }
  std::int64_t is_hit() const { return kChoice + lines(pairs() * 4); }
  std::int64_t weights() const { return is_hit() + lines(pairs() * 4); }
  std::int64_t fetched() const { return weights() + lines(pairs() * 4); }
  std::int64_t guess() const { return fetched() + lines(pairs() * 8); }
  std::int64_t layer_bytes() const { return guess() + lines(pairs() * 4); }
  std::int64_t hidden() const { return num_layers * layer_bytes(); }
  std::int64_t results() const {
    return hidden() + lines(num_rows * hidden_size * value_bytes(type));
  }
  std::int64_t num_bytes() const { return results() + lines(pairs() * hidden_size * 4); }

 private:
  static constexpr std::int64_t lines(std::int64_t bytes) {
    return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  }
};

// A mailbox in memory that must be aligned to 64 bytes, zero at first, and outlive it.
class Mailbox {
 public:
  Mailbox(const MailboxLayout& layout, std::uint8_t* memory) : layout_(layout), memory_(memory) {}

  const MailboxLayout& layout() const { return layout_; }
  std::uint32_t* doorbell(std::int64_t layer) const {
    return at<std::uint32_t>(layer, layout_.kDoorbell);
  }
  std::uint32_t* done(std::int64_t layer) const {
    return at<std::uint32_t>(layer, layout_.kDone);
  }
  std::uint32_t* error(std::int64_t layer) const {
    return at<std::uint32_t>(layer, layout_.kError);
  }
  std::int32_t* choice(std::int64_t layer) const {
    return at<std::int32_t>(layer, layout_.kChoice);
  }
  std::int32_t* is_hit(std::int64_t layer) const {
    return at<std::int32_t>(layer, layout_.is_hit());
  }
  float* weights(std::int64_t layer) const { return at<float>(layer, layout_.weights()); }
  std::uint64_t* fetched(std::int64_t layer) const {
    return at<std::uint64_t>(layer, layout_.fetched());
  }
  std::uint32_t* guessed(std::int64_t layer) const {
    return at<std::uint32_t>(layer, layout_.kGuessed);
  }
  std::int32_t* guess(std::int64_t layer) const {
    return at<std::int32_t>(layer, layout_.guess());
  }
  void* hidden() const { return memory_ + layout_.hidden(); }
  float* results() const { return reinterpret_cast<float*>(memory_ + layout_.results()); }

  bool has_misses(std::int64_t layer) const {
    const std::int32_t* hits = is_hit(layer);
    for (std::int64_t i = 0; i < layout_.pairs(); ++i)
      if (hits[i] == 0) return true;
    return false;
  }

 private:
  template <typename T>
  T* at(std::int64_t layer, std::int64_t offset) const {
    return reinterpret_cast<T*>(memory_ + layer * layout_.layer_bytes() + offset);
  }

  MailboxLayout layout_;
  std::uint8_t* memory_;
};

}  // namespace tandem
