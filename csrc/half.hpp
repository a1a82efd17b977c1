// bf16, fp16 and e4m3 as bits. Functions are static, because each file is compiled for its own
// instruction set.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tandem {

static inline float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Rounds to the nearest even, as torch does; NaN stays NaN. Has no branch, so that loops of it are
// vectorized.
static inline std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40
                                           : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// The functions below have no branch either. A subnormal number is computed as a normal one minus
// its power of two.
static inline float half_to_float(std::uint16_t bits) {
  const std::uint32_t size = (bits & 0x7FFFu) << 13, sign = (bits & 0x8000u) << 16;
  const float subnormal = std::bit_cast<float>(size + (113u << 23)) - 0x1p-14f;
  std::uint32_t value = size + (112u << 23);
  value = size < 1u << 23 ? std::bit_cast<std::uint32_t>(subnormal) : value;
  value = size >= 31u << 23 ? size | 0x7F800000 : value;
  return std::bit_cast<float>(value | sign);
}

// Rounds to the nearest even, as torch does. Too large numbers become infinite; NaN stays NaN.
static inline std::uint16_t float_to_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t size = bits & 0x7FFFFFFF, sign = (bits & 0x80000000) >> 16;
  // Below 2^-14 fp16 has steps of 2^-24, the last bit of floats from .5 to 1.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3F000000;
  std::uint32_t half = (size - (112u << 23) + 0xFFF + ((size >> 13) & 1)) >> 13;
  half = size < 113u << 23 ? subnormal : half;
  half = size >= 143u << 23 ? 0x7C00 : half;  // 65,536
  half = size > 0x7F800000 ? 0x7E00 | ((size >> 13) & 0x3FF) : half;
  return static_cast<std::uint16_t>(half | sign);
}

// Four bits of exponent, three of mantissa; no infinity, and one NaN per sign.
static inline float e4m3_to_float(std::uint8_t bits) {
  const std::uint32_t size = (bits & 0x7Fu) << 20, sign = (bits & 0x80u) << 24;
  const float subnormal = std::bit_cast<float>(size + (121u << 23)) - 0x1p-6f;
  std::uint32_t value = size + (120u << 23);
  value = size < 1u << 23 ? std::bit_cast<std::uint32_t>(subnormal) : value;
  value = size == 0x7Fu << 20 ? 0x7FC00000 : value;
  return std::bit_cast<float>(value | sign);
}

}  // namespace tandem
