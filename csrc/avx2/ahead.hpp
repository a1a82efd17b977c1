// What is asked of memory before it is needed. Included like output.hpp.
#pragma once

#include "../codes.hpp"
#include "output.hpp"

namespace tandem {
namespace {

// The hardware follows a stream to the end of its page only. Lines on their way to the first cache
// have few places, hence two steps: from afar into the second, shortly before use into the first.
constexpr std::int64_t kFarBytes = 4096;
constexpr std::int64_t kNearBytes = 1024;

// Always inlined, here and below: GCC drops calls of functions that do nothing else.
template <_mm_hint Hint>
TANDEM_INLINE void fetch(const std::uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), Hint);
}

TANDEM_INLINE void fetch_stream(const std::uint8_t* at) {
  fetch<_MM_HINT_T1>(at + kFarBytes);
  fetch<_MM_HINT_T0>(at + kNearBytes);
}

// Lines from `at` on, asked for in `count` pieces: all at once would keep other loads waiting.
class Pieces {
 public:
  Pieces(const std::uint8_t* at, std::int64_t bytes, std::int64_t count)
      : at_(at), end_(at + bytes), piece_((bytes / 64 / count + 1) * 64) {}

  TANDEM_INLINE void fetch_next() {
    const std::uint8_t* end = end_ - at_ < piece_ ? end_ : at_ + piece_;
    for (; at_ < end; at_ += 64) fetch<_MM_HINT_T1>(at_);
  }

 private:
  const std::uint8_t *at_, *end_;
  std::int64_t piece_;
};

// How many calls in_tiles<Most> makes.
constexpr std::int64_t num_tiles(std::int64_t num_tokens, std::int64_t most) {
  return (num_tokens + most - 1) / most;
}

}  // namespace
}  // namespace tandem
