// Packed weights as the kernels see them; docs/formats.md has the layout byte by byte.
#pragma once

#include <bit>
#include <cstdint>

#include "grids.hpp"

namespace tandem {

// The values are those that tandem.kernels.native passes; `kEncodings` is in their order.
enum class Format : int {
  kBf16 = 0,
  kInt8 = 1,
  kInt4 = 2,
  kInt4Zero = 3,
  kMxfp4 = 4,
  kFp16 = 5,
  kFp8 = 6,
  kQ4K = 7,
  kQ5K = 8,
  kQ6K = 9,
  kInt5Zero = 10,
  kIq4Nl = 11,
  kIq4Xs = 12,
  kNvfp4 = 13,
  kQ2K = 14,
  kQ3K = 15,
  kIq3Xxs = 16,
  kIq3S = 17,
  kIq2Xxs = 18,
  kIq2Xs = 19,
  kInt5 = 20,
  kIq2S = 21,
  kIq1S = 22,
  kIq1M = 23,
  // Not for experts: the form of a grid's lines before they are multiplied.
  kStrips32 = 24,
  kStrips16 = 25
};

// How the scale of a group of columns is stored.
enum class ScaleKind {
  kNone,
  kFp16,
  kE8m0,
  kFp32OfBlock,
  kInt8OfSuper,  // bytes, times an fp16 factor per 256 columns
  kNibblesOfSuper,  // the same, with a scale and above it a minimum in each byte
  kE4m3OfRow,  // bytes, times an fp32 factor per row
  kFp32,
  kOfGrid  // among the codes, times an fp16 factor per 256 columns
};

// The properties of a format. Kernels use these, never a format's name.
struct Encoding {
  int bits;  // per code: 16, 8, or planes of 4, 2 and 1 bits
  ScaleKind scale = ScaleKind::kNone;
  bool has_minima = false;  // whether each scale has a minimum
  int offset = 0;  // the unsigned code for zero
  int largest = 0;  // the largest unsigned code of integer formats
  std::int64_t group = 0;  // columns that share a scale; 0: set by the matrix
  const std::uint8_t* table = nullptr;  // maps 16 stored codes to unsigned ones
  float unit = 1;  // for tables: the value of one step of the codes; a power of two
  // `table` is indexed by a sign bit above the number's bits; no planes.
  const Grid* grid = nullptr;
};

// Twice the values of e2m1, plus 12.
constexpr std::uint8_t kE2m1Table[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                         12, 11, 10, 9,  8,  6,  4,  0};
// llama.cpp's kvalues_iq4nl, plus 127.
constexpr std::uint8_t kIq4Table[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                        128, 140, 152, 165, 180, 196, 216, 240};
// Unsigned codes of the grids' numbers, first without the sign bit, then with it: half of IQ3_XXS's
// number plus 31, IQ3_S's plus 15, IQ2's plus 43, and eight times IQ1's plus 9, to which the sign
// bit adds -1 if it is set and 1 otherwise.
constexpr std::uint8_t kIq3XxsTable[16] = {33, 37, 41, 45, 49, 53, 57, 62,
                                           29, 25, 21, 17, 13, 9,  5,  0};
constexpr std::uint8_t kIq3STable[16] = {16, 18, 20, 22, 24, 26, 28, 30,
                                         14, 12, 10, 8,  6,  4,  2,  0};
constexpr std::uint8_t kIq2Table[8] = {51, 68, 86, 43, 35, 18, 0, 43};
constexpr std::uint8_t kIq1Table[8] = {2, 10, 18, 9, 0, 8, 16, 9};

constexpr Encoding kEncodings[] = {
    {16},  // kBf16
    {8, ScaleKind::kFp16, false, 128, 255},  // kInt8
    {4, ScaleKind::kFp16, false, 8, 15},  // kInt4
    {4, ScaleKind::kFp16, true, 0, 15},  // kInt4Zero
    {4, ScaleKind::kE8m0, false, 12, 24, 32, kE2m1Table},  // kMxfp4
    {16},  // kFp16
    {8, ScaleKind::kFp32OfBlock, false, 0, 0, 128},  // kFp8
    {4, ScaleKind::kInt8OfSuper, true, 0, 15, 32},  // kQ4K
    {5, ScaleKind::kInt8OfSuper, true, 0, 31, 32},  // kQ5K
    {6, ScaleKind::kInt8OfSuper, false, 32, 63, 16},  // kQ6K
    {5, ScaleKind::kFp16, true, 0, 31, 32},  // kInt5Zero
    {4, ScaleKind::kFp16, false, 127, 240, 32, kIq4Table},  // kIq4Nl
    {4, ScaleKind::kInt8OfSuper, false, 127, 240, 32, kIq4Table},  // kIq4Xs
    {4, ScaleKind::kE4m3OfRow, false, 12, 24, 16, kE2m1Table, 0.5f},  // kNvfp4
    {2, ScaleKind::kNibblesOfSuper, true, 0, 3, 16},  // kQ2K
    {3, ScaleKind::kInt8OfSuper, false, 4, 7, 16},  // kQ3K
    {0, ScaleKind::kOfGrid, false, 31, 62, 32, kIq3XxsTable, 0.5f, &kIq3Xxs},
    {0, ScaleKind::kOfGrid, false, 15, 30, 32, kIq3STable, 1, &kIq3S},
    {0, ScaleKind::kOfGrid, false, 43, 86, 32, kIq2Table, 0.125f, &kIq2Xxs},
    {0, ScaleKind::kOfGrid, false, 43, 86, 16, kIq2Table, 0.125f, &kIq2Xs},
    {5, ScaleKind::kFp16, false, 16, 31, 32},  // kInt5
    {0, ScaleKind::kOfGrid, false, 43, 86, 16, kIq2Table, 0.125f, &kIq2S},
    {0, ScaleKind::kOfGrid, false, 9, 18, 32, kIq1Table, 0.125f, &kIq1S},
    {0, ScaleKind::kOfGrid, false, 9, 18, 16, kIq1Table, 0.125f, &kIq1M},
    {8, ScaleKind::kFp32, false, 0, 255, 32},  // kStrips32
    {8, ScaleKind::kFp32, false, 0, 255, 16},  // kStrips16
};
constexpr int kNumEncodings = sizeof kEncodings / sizeof kEncodings[0];
constexpr int kNumFormats = kNumEncodings - 2;  // formats that experts may have

constexpr const Encoding& encoding(Format format) { return kEncodings[static_cast<int>(format)]; }

constexpr bool is_grid(Format format) { return encoding(format).grid != nullptr; }

// Whether AVX2's and AVX-512's products are compiled for a format. Not for grids, whose lines
// become strips of bytes first. Builds for finding memory errors omit formats whose planes, tables
// and scales also occur in others; the portable kernels have them all.
constexpr bool has_vector_kernels(Format format) {
#if defined(TANDEM_FORMATS_OF_EACH_KIND)
  for (const Format alike :
       {Format::kQ5K, Format::kQ3K, Format::kIq4Nl, Format::kIq4Xs, Format::kInt5})
    if (format == alike) return false;
#endif
  return !is_grid(format);
}

constexpr std::int64_t kBlockRows = 16;
constexpr std::int64_t kSuperCols = 256;  // columns whose groups' scales share a factor
constexpr std::int64_t kStripCols = 32;  // the planes of bits of a strip are adjacent
constexpr std::int64_t kRowFactorBytes = 64;  // fp32 factors of a block's rows

// `blocks` blocks of 16 rows with `cols` columns each (padded to whole groups).
struct PackedMatrix {
  Format format;
  std::int64_t blocks;
  std::int64_t cols;
  std::int64_t group;  // columns that share a scale; 0: no scales
  const std::uint8_t* data;
  const std::uint8_t* scales;
  const float* bias;  // one per padded row, or null
};

// Rows of activations in the form that a format multiplies with. Row t begins t * stride values
// after the first; a stride of 0 repeats one row.
struct Activations {
  const std::int8_t* quantized;  // for integer formats; scales and sums have one value per group
  const float* scales;
  const std::int32_t* sums;  // of the group's values, see stored_sum()
  const std::uint16_t* bf16;  // kBf16, kFp8: e4m3 is exact in bf16
  const float* fp32;  // kFp16: bf16 would lose digits of its weights, fp16 would lose range
  std::int64_t stride;  // in values
  std::int64_t group_stride;  // in groups

  // For formats with minima: a group's sum times its scale.
  float scaled_sum(std::int64_t group) const { return std::bit_cast<float>(sums[group]); }
};

// The form of a format's activations: int8 with scales and sums, bf16, or fp32.
enum class ActivationForm { kInt8, kBf16, kFp32 };

constexpr ActivationForm activation_form(Format format) {
  switch (format) {
    case Format::kBf16:
    case Format::kFp8: return ActivationForm::kBf16;
    case Format::kFp16: return ActivationForm::kFp32;
    default: return ActivationForm::kInt8;
  }
}

constexpr bool is_integer(Format format) {
  return activation_form(format) == ActivationForm::kInt8;
}

// Bytes of the codes of `cols` columns of a block; for grids, `cols` is a multiple of 256.
constexpr std::int64_t code_bytes(Format format, std::int64_t cols) {
  if (is_grid(format)) return cols / kSuperCols * encoding(format).grid->words * 4 * kBlockRows;
  return cols * kBlockRows * encoding(format).bits / 8;
}

// Scales are stored by group: those of a block's 16 rows, then their minima. Factors of a
// super-block, or of the rows, come before the bytes of its groups.
constexpr std::int64_t scale_bytes(Format format, std::int64_t cols, std::int64_t group) {
  const std::int64_t lines = encoding(format).has_minima ? 2 : 1;
  switch (encoding(format).scale) {
    case ScaleKind::kNone: return 0;
    case ScaleKind::kFp16: return cols / group * 32 * lines;
    case ScaleKind::kE8m0: return cols / group * 16 * lines;
    case ScaleKind::kFp32OfBlock: return cols / group * 4;
    case ScaleKind::kInt8OfSuper:
      return cols / kSuperCols * lines * (32 + kSuperCols / group * 16);
    case ScaleKind::kNibblesOfSuper: return cols / kSuperCols * (64 + kSuperCols / group * 16);
    case ScaleKind::kE4m3OfRow: return kRowFactorBytes + cols / group * 16;
    case ScaleKind::kFp32:
      return cols / group * 64;
    case ScaleKind::kOfGrid:
      return encoding(format).grid->factor.width > 0 ? 0 : cols / kSuperCols * 32;
  }
  return 0;
}

// Whether columns are in super-blocks, whose scales have factors.
constexpr bool has_supers(Format format) {
  return encoding(format).scale == ScaleKind::kInt8OfSuper ||
         encoding(format).scale == ScaleKind::kNibblesOfSuper || is_grid(format);
}

// Offsets of the factors of a group's super-block, and of the group's own bytes after them; `index`
// counts groups over all blocks.
constexpr std::int64_t super_begin(Format format, std::int64_t index) {
  const std::int64_t group = encoding(format).group;
  return index / (kSuperCols / group) * scale_bytes(format, kSuperCols, group);
}

constexpr std::int64_t in_super(Format format, std::int64_t index) {
  const std::int64_t factors = encoding(format).has_minima ? 64 : 32;
  const bool has_two = encoding(format).scale == ScaleKind::kInt8OfSuper && factors == 64;
  return factors + index % (kSuperCols / encoding(format).group) * (has_two ? 32 : 16);
}

// Offset of a group's e4m3 scales, after the row factors of this and all earlier blocks.
constexpr std::int64_t e4m3_begin(std::int64_t block, std::int64_t index) {
  return (block + 1) * kRowFactorBytes + index * 16;
}

constexpr std::int64_t row_factors(Format format, std::int64_t block, std::int64_t cols) {
  return block * scale_bytes(format, cols, encoding(format).group);
}

// A group's integer dot product is below 2^22. If a sum starts at the bits of this float, 1.5 *
// 2^23, its bits are those of the float plus the product, so no conversion is needed. One
// instruction multiplies it by a scale and subtracts the base times the scale.
constexpr float kSumBase = 12582912.0f;
constexpr std::int32_t kSumStart = std::bit_cast<std::int32_t>(kSumBase);

// Whether the base times a scale is exact: a scale has the 11 digits of fp16, or 18 with those of a
// byte.
constexpr bool has_short_scales(Format format) {
  return encoding(format).scale != ScaleKind::kE4m3OfRow;
}

// How the sum of a group's int8 values is stored. Without minima, it is where the accumulator
// starts: the base minus the sum times the codes' offset, which removes what the offset adds to a
// dot product. With minima, it is the bits of a float that is multiplied by the minimum: the sum
// times the scale.
inline std::int32_t stored_sum(Format format, std::int32_t sum, float scale) {
  if (!encoding(format).has_minima) return kSumStart - encoding(format).offset * sum;
  return std::bit_cast<std::int32_t>(scale * static_cast<float>(sum));
}

}  // namespace tandem
