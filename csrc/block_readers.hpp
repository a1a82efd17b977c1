// Reads blocks of GGUF files into codes and scales of packed formats.
#pragma once

#include <cstdint>
#include <variant>

#include "placed_rows.hpp"

namespace tandem {

// The numbers are ggml's. kFields is for sources without blocks.
enum class BlockKind : int {
  kFields = 0,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2K = 10,
  kQ3K = 11,
  kQ4K = 12,
  kQ5K = 13,
  kQ6K = 14,
  kIq2Xxs = 16,
  kIq2Xs = 17,
  kIq3Xxs = 18,
  kIq1S = 19,
  kIq4Nl = 20,
  kIq3S = 21,
  kIq2S = 22,
  kIq4Xs = 23,
  kIq1M = 29,
  kMxfp4 = 39,
  kNvfp4 = 40
};

template <class Row>
using ReadBlock = void (*)(const std::uint8_t* block, Row& out);

struct BlockReader {
  std::int64_t cols = 1, bytes = 0;  // per block; no bytes: this kind is not supported
  std::variant<ReadBlock<Strip>, ReadBlock<Sixteens>, ReadBlock<Super>, ReadBlock<Lines>> read;

  BlockReader() = default;
  template <class Row>
  BlockReader(std::int64_t bytes, void (*read)(const std::uint8_t*, Row&))
      : cols(Row::kCols), bytes(bytes), read(read) {}
};

BlockReader block_reader(BlockKind kind);

}  // namespace tandem
