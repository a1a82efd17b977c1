// A model's tensors on the native side: fp32, bf16 or fp16 values. Experts take tokens of each
// type; dense kernels, attention and small operations take the first two.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.hpp"

namespace tandem {

// The values are those of TOKEN_DTYPES in tandem.kernels.native.
enum class ValueType : int { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

constexpr std::int64_t value_bytes(ValueType type) { return type == ValueType::kFp32 ? 4 : 2; }

static inline const void* value_at(const void* values, ValueType type, std::int64_t index) {
  return static_cast<const std::uint8_t*>(values) + index * value_bytes(type);
}

static inline void* value_at(void* values, ValueType type, std::int64_t index) {
  return static_cast<std::uint8_t*>(values) + index * value_bytes(type);
}

// Converts `count` contiguous values to fp32.
static inline void load_values(const void* from, ValueType type, std::int64_t count, float* to) {
  if (type == ValueType::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  const auto* bits = static_cast<const std::uint16_t*>(from);
  if (type == ValueType::kBf16)
    for (std::int64_t i = 0; i < count; ++i) to[i] = bf16_to_float(bits[i]);
  else
    for (std::int64_t i = 0; i < count; ++i) to[i] = half_to_float(bits[i]);
}

static inline void store_values(const float* from, std::int64_t count, ValueType type, void* to) {
  if (type == ValueType::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  auto* bits = static_cast<std::uint16_t*>(to);
  if (type == ValueType::kBf16)
    for (std::int64_t i = 0; i < count; ++i) bits[i] = float_to_bf16(from[i]);
  else
    for (std::int64_t i = 0; i < count; ++i) bits[i] = float_to_half(from[i]);
}

}  // namespace tandem
