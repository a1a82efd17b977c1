// Rearranges blocks of 256 numbers as files have them into packed matrices: the same codes and
// scales in other places.
#pragma once

#include <cstdint>
#include <span>

#include "packed.hpp"

namespace tandem {

// Rows of one kind of blocks, and where they go.
struct Rearrangement {
  Format format;  // of both: files name the blocks as formats with super-blocks are named
  const std::uint8_t* source;
  const std::int64_t* order;  // which row of the source each row is; null: the same
  std::int64_t rows, cols;    // `cols` in whole super-blocks
  std::uint8_t* data;
  std::uint8_t* scales;
  std::int64_t data_stride, scale_stride;  // bytes from one block of 16 rows to the next
};

// Bytes of 256 numbers in a file; 0 for formats that no blocks are.
std::int64_t source_bytes(Format format);

// Writes every block of 16 rows of each, padding included; mapped files are read ahead. False, with
// some blocks written perhaps, if a scale is not finite. Throws std::system_error if the system gives
// no thread.
bool rearrange(std::span<const Rearrangement> works, int num_threads);

}  // namespace tandem
