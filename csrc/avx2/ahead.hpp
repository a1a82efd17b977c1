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

// By the numbers of __builtin_prefetch: _mm_prefetch's hints are an enum with GCC, and none with Clang.
enum class Cache { kSecond = 2, kFirst = 3 };

// Always inlined, here and below: GCC drops calls of functions that do nothing else.
template <Cache To>
TANDEM_INLINE void fetch(const std::uint8_t* at) {
  __builtin_prefetch(at, 0, static_cast<int>(To));
}

TANDEM_INLINE void fetch_stream(const std::uint8_t* at) {
  fetch<Cache::kSecond>(at + kFarBytes);
  fetch<Cache::kFirst>(at + kNearBytes);
}

// Lines from `at` on, asked for in `count` pieces: all at once would keep other loads waiting.
class Pieces {
 public:
  Pieces(const std::uint8_t* at, std::int64_t bytes, std::int64_t count)
      : at_(at), end_(at + bytes), piece_((bytes / 64 / count + 1) * 64) {}

  TANDEM_INLINE void fetch_next() {
    const std::uint8_t* end = end_ - at_ < piece_ ? end_ : at_ + piece_;
    for (; at_ < end; at_ += 64) fetch<Cache::kSecond>(at_);
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
