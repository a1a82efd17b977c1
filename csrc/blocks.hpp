// Rearranges quantised rows of files into packed matrices: the same codes and scales in another
// layout.
#pragma once

#include <cstdint>
#include <span>

#include "block_readers.hpp"
#include "packed.hpp"

namespace tandem {

// The values are those that tandem.kernels.formats.file_rows passes.
enum class NumberType : int { kFp16 = 0, kBf16 = 1, kFp32 = 2, kByte = 3 };

// One number per row and group; strides are in bytes and may be 0.
struct Numbers {
  const std::uint8_t* at;  // null: no numbers
  NumberType type;
  std::int64_t row_stride, group_stride;
};

// Codes in words of 32 bits, lowest bits first, with their scales in separate arrays.
struct Fields {
  std::int64_t row_stride, word_stride;  // bytes between rows of words, and between words
  // A nibble for each of eight rows that share a word; 0: a word belongs to one row.
  std::uint32_t places;
  std::uint8_t flip;  // bits to flip in every code
  std::int64_t group;  // columns of the packed matrix that share a scale
  std::int64_t repeats;  // groups that share one scale of the source
  std::int64_t scale_rows;  // rows that share a scale
  Numbers scales, minima;
};

// Rows of one kind, and their destination.
struct Rearrangement {
  Format format;
  BlockKind kind;
  const std::uint8_t* source;
  const std::int64_t* order;  // the source row of each row; null: the same
  std::int64_t rows, cols;  // `cols`: whole blocks
  std::uint8_t* data;
  std::uint8_t* scales;
  std::int64_t data_stride, scale_stride;  // bytes from one block of 16 rows to the next
  const std::uint8_t* table;  // maps codes to new codes, or null
  const float* factor;  // for formats with a factor per row, the same for all rows; null: 1
  Fields fields;  // for kind kFields
};

// Writes all blocks of 16 rows, including padding; prefetches mapped files. Returns false, perhaps
// after writing some blocks, if a scale (or an e4m3 code) is not finite or not exact in the format.
bool rearrange(std::span<const Rearrangement> works, int num_threads);

// Writes 16 rows of fields in the same way.
bool rearrange_fields(const Rearrangement& work, std::int64_t block);

// Writes the factors of a block's rows before its scales; returns false if one is not finite.
bool write_factors(const Rearrangement& work, std::int64_t block, std::uint8_t* out);

}  // namespace tandem
