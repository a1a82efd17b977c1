// How a target reads the fuzzer's bytes: sizes that are mostly small and sometimes hostile, and
// memory of exactly the stated size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>

namespace tandem::fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  std::uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }

  std::int64_t below(std::int64_t most) { return byte() % most; }

  // A number, more often small than hostile.
  std::int64_t number() {
    constexpr std::int64_t kHostile[] = {
        -1,      0,         INT64_MIN, INT64_MAX, INT64_MAX / 2, std::int64_t{1} << 28,
        1 << 16, INT32_MAX, std::int64_t{1} << 32, std::int64_t{1} << 40, std::int64_t{1} << 62, 255};
    const std::uint8_t first = byte();
    if (first < 200) return first;
    if (first < 240) return first * 8 + byte();
    return kHostile[byte() % std::size(kHostile)];
  }

  // The right number, except for one time in sixteen.
  std::int64_t about(std::int64_t right) {
    const std::uint8_t first = byte();
    if (first >= 16) return right;
    return first < 8 ? right + first - 4 : number();
  }

  // `bytes` bytes (up to a megabyte), which repeat the remaining input. The first byte after them
  // must not be read.
  std::unique_ptr<std::uint8_t[]> memory(std::int64_t bytes) {
    auto found = std::make_unique<std::uint8_t[]>(static_cast<std::size_t>(bytes));
    for (std::int64_t at = 0; left_ > 0 && at < bytes; at += static_cast<std::int64_t>(left_))
      std::memcpy(found.get() + at, data_, std::min<std::size_t>(left_, static_cast<std::size_t>(bytes - at)));
    return found;
  }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

constexpr std::int64_t kMostBytes = 1 << 20;

// Limits a size to what memory() can give.
inline std::int64_t bounded(std::int64_t bytes) {
  return bytes < 0 ? 0 : bytes > kMostBytes ? kMostBytes : bytes;
}

}  // namespace tandem::fuzz
