// Rearranges blocks of 32 or 256 numbers as files have them into packed matrices: the same codes and
// scales in other places.
#pragma once

#include <cstdint>
#include <span>

#include "packed.hpp"

namespace tandem {

// Rows of one kind of blocks, and where they go.
struct Rearrangement {
  Format format;  // of both: each kind of blocks is a format's own
  const std::uint8_t* source;
  const std::int64_t* order;  // which row of the source each row is; null: the same
  std::int64_t rows, cols;    // `cols` in whole blocks
  std::uint8_t* data;
  std::uint8_t* scales;
  std::int64_t data_stride, scale_stride;  // bytes from one block of 16 rows to the next
};

// Bytes and numbers of a block in a file; no bytes for formats that no blocks are. Formats whose
// groups have any size are blocks where these are of 32 columns.
std::int64_t source_bytes(Format format);
std::int64_t source_cols(Format format);

// Writes every block of 16 rows of each, padding included; mapped files are read ahead. False, with
// some blocks written perhaps, if a scale is not finite. Throws std::system_error if the system gives
// no thread.
bool rearrange(std::span<const Rearrangement> works, int num_threads);

}  // namespace tandem
