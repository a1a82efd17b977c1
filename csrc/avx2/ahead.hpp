// Prefetching on 256-bit registers. Included like output.hpp.
#pragma once

#include "../codes.hpp"
#include "output.hpp"

namespace tandem {
namespace {

// The hardware prefetcher stops at the end of a page. Few lines can be on their way to the
// first-level cache at once, so there are two steps: from far into the second level, shortly before
// use into the first.
constexpr std::int64_t kFarBytes = 4096;
constexpr std::int64_t kNearBytes = 1024;

// The values are the locality arguments of __builtin_prefetch. _mm_prefetch would not do: its hints
// are an enum in GCC and integers in Clang.
enum class Cache { kSecond = 2, kFirst = 3 };

// Here and below always inlined: GCC drops calls of functions that only prefetch.
template <Cache To>
TANDEM_INLINE void fetch(const std::uint8_t* at) {
  __builtin_prefetch(at, 0, static_cast<int>(To));
}

TANDEM_INLINE void fetch_stream(const std::uint8_t* at) {
  fetch<Cache::kSecond>(at + kFarBytes);
  fetch<Cache::kFirst>(at + kNearBytes);
}

// Prefetches lines from `at` on in `count` pieces, since all at once would delay other loads.
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

// Number of calls that in_tiles<Most> makes.
constexpr std::int64_t num_tiles(std::int64_t num_tokens, std::int64_t most) {
  return (num_tokens + most - 1) / most;
}

}  // namespace
}  // namespace tandem
