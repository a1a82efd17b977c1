// bf16, fp16 and e4m3 as bits. Static: each file is compiled for its own instruction set.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tandem {

static inline float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Rounds to the nearest even, as torch does; NaN stays NaN. Without a branch, so that loops of it
// become vectors.
static inline std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40
                                           : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float half_to_float(std::uint16_t bits) {
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  const int exponent = (bits >> 10) & 31;
  const auto mantissa = static_cast<float>(bits & 1023);
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

// Four bits of exponent, three of mantissa; no infinity, and one NaN for each sign.
static inline float e4m3_to_float(std::uint8_t bits) {
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -9);
  return sign * std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

}  // namespace tandem
