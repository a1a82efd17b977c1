// Rearranges rows that are quantised already, as files have them, into packed matrices: the same
// codes and scales in other places.
#pragma once

#include <cstdint>
#include <span>

#include "block_readers.hpp"
#include "packed.hpp"

namespace tandem {

// The numbers are those that tandem.kernels.formats.file_rows passes.
enum class NumberType : int { kFp16 = 0, kBf16 = 1, kFp32 = 2, kByte = 3 };

// A number for each row and group; strides are in bytes and may be 0.
struct Numbers {
  const std::uint8_t* at;  // null: there are none
  NumberType type;
  std::int64_t row_stride, group_stride;
};

// Codes in words of 32 bits, of a format's own width, lowest bits first, and their scales apart.
struct Fields {
  std::int64_t row_stride, word_stride;  // bytes from a row of words to the next, from word to word
  std::uint32_t places;  // of eight rows that share a word: a nibble each; 0: a word is one row's
  std::uint8_t flip;     // bits that are turned in every code
  std::int64_t group;    // columns of the packed matrix that share a scale
  std::int64_t repeats;  // groups that share one of the source's
  std::int64_t scale_rows;  // rows that share a scale
  Numbers scales, minima;
};

// Rows of one kind, and where they go.
struct Rearrangement {
  Format format;
  BlockKind kind;
  const std::uint8_t* source;
  const std::int64_t* order;  // which row of the source each row is; null: the same
  std::int64_t rows, cols;    // `cols` in whole blocks
  std::uint8_t* data;
  std::uint8_t* scales;
  std::int64_t data_stride, scale_stride;  // bytes from one block of 16 rows to the next
  const std::uint8_t* table;  // what codes become, or null
  const float* factor;        // of all rows, for formats with factors of rows; null: 1
  Fields fields;              // of kind kFields
};

// Writes every block of 16 rows of each, padding included; mapped files are read ahead. False, with
// some blocks written perhaps, if a scale (or an e4m3 code) is not finite or not exact in the
// format.
bool rearrange(std::span<const Rearrangement> works, int num_threads);

// The same for 16 rows of fields.
bool rearrange_fields(const Rearrangement& work, std::int64_t block);

// Writes the factors of a block's rows in front of its scales; false if they are not finite.
bool write_factors(const Rearrangement& work, std::int64_t block, std::uint8_t* out);

}  // namespace tandem
