// Tensors of the model as the dense kernels and attention see them: fp32 or bf16 values.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.hpp"

namespace tandem {

// The numbers are those that tandem.kernels.values passes.
enum class ValueType : int { kFp32 = 0, kBf16 = 1 };

constexpr std::int64_t value_bytes(ValueType type) { return type == ValueType::kBf16 ? 2 : 4; }

static inline const void* value_at(const void* values, ValueType type, std::int64_t index) {
  return static_cast<const std::uint8_t*>(values) + index * value_bytes(type);
}

static inline void* value_at(void* values, ValueType type, std::int64_t index) {
  return static_cast<std::uint8_t*>(values) + index * value_bytes(type);
}

// Copies `count` values that lie side by side to fp32.
static inline void load_values(const void* from, ValueType type, std::int64_t count, float* to) {
  if (type == ValueType::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  const auto* bits = static_cast<const std::uint16_t*>(from);
  for (std::int64_t i = 0; i < count; ++i) to[i] = bf16_to_float(bits[i]);
}

static inline void store_values(const float* from, std::int64_t count, ValueType type, void* to) {
  if (type == ValueType::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  auto* bits = static_cast<std::uint16_t*>(to);
  for (std::int64_t i = 0; i < count; ++i) bits[i] = float_to_bf16(from[i]);
}

}  // namespace tandem
