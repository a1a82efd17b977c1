// Packed weights as the kernels see them; docs/formats.md has the layout, byte by byte.
#pragma once

#include <cstdint>

namespace tandem {

// The numbers are those that tandem.kernels.native passes.
enum class Format : int {
  kBf16 = 0,
  kInt8 = 1,
  kInt4 = 2,
  kInt4Zero = 3,
  kMxfp4 = 4,
  kFp16 = 5,
  kFp8 = 6
};

constexpr std::int64_t kBlockRows = 16;

// `blocks` blocks of 16 rows with `cols` columns each (padded to whole groups).
struct PackedMatrix {
  Format format;
  std::int64_t blocks;
  std::int64_t cols;
  std::int64_t group;  // columns that share a scale; 0 without scales
  const std::uint8_t* data;
  const std::uint8_t* scales;
  const float* bias;  // one per padded row, or null
};

// Rows of activations in the form that a format multiplies with. Row t begins t * stride values
// after the first; a stride of 0 repeats one row.
struct Activations {
  const std::int8_t* quantized;  // integer formats; scales and sums have one value per group
  const float* scales;
  const std::int32_t* sums;   // of the group's values, times sum_factor(format)
  const std::uint16_t* bf16;  // kBf16, kFp8: e4m3 is exact in bf16
  const float* fp32;          // kFp16: bf16 would lose digits of its weights, fp16 the range
  std::int64_t stride;        // in values
  std::int64_t group_stride;  // in groups
};

// What a format's activations are: int8 with scales and sums, bf16, or fp32.
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

constexpr std::int64_t bits_per_code(Format format) {
  switch (format) {
    case Format::kBf16:
    case Format::kFp16: return 16;
    case Format::kInt8:
    case Format::kFp8: return 8;
    default: return 4;
  }
}

// What is subtracted from a stored code to get its value: codes are unsigned for the multiplier.
constexpr std::int32_t code_offset(Format format) {
  switch (format) {
    case Format::kInt8: return 128;
    case Format::kInt4: return 8;
    case Format::kMxfp4: return 12;  // twice the e2m1 value, plus 12
    default: return 0;
  }
}

// What the sums of activations are stored times: what the codes' offset adds to a dot product is
// taken off by starting the accumulator there. Zero points need the plain sum.
constexpr std::int32_t sum_factor(Format format) {
  return format == Format::kInt4Zero ? 1 : -code_offset(format);
}

}  // namespace tandem
