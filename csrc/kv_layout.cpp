#include "kv_layout.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tandem {
namespace {

constexpr float kLargest = 127.0f;
constexpr float kSmallestScale = 1e-32f;  // a smaller scale rounds everything to zeros

void clear(std::uint8_t* block, std::int64_t num_bytes) { std::fill_n(block, num_bytes, 0); }

// The greatest magnitude; NaN if a value is not finite, which a plain maximum would miss.
float peak_of(const float* values, std::int64_t count) {
  float peak = 0, residue = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    peak = std::max(peak, std::fabs(values[i]));
    residue += values[i] * 0.0f;
  }
  return peak + residue;
}

// The position of value d of a key (or value) at position `at` in a block. `Pack` is a compile-time
// constant, because dividing by it would cost more than all else.
template <int Pack>
std::int64_t key_place(std::uint64_t d, std::int64_t at, std::int64_t) {
  return (static_cast<std::int64_t>(d / Pack) * kKvBlock + at) * Pack + d % Pack;
}

template <int Pack>
std::int64_t value_place(std::uint64_t d, std::int64_t at, std::int64_t width) {
  return (at / Pack * width + static_cast<std::int64_t>(d)) * Pack + at % Pack;
}

std::int64_t joint_place(std::uint64_t d, std::int64_t, std::int64_t) {
  return static_cast<std::int64_t>(d);
}

float scale_of(const float* values, std::int64_t dim) { return peak_of(values, dim) / kLargest; }

template <auto Place>
void store_fp32(std::uint8_t* block, const float* values, std::int64_t dim, std::int64_t at,
                std::int64_t width) {
  auto* to = reinterpret_cast<float*>(block);
  for (std::int64_t d = 0; d < dim; ++d) to[Place(d, at, width)] = values[d];
}

template <auto Place>
void store_bf16(std::uint8_t* block, const float* values, std::int64_t dim, std::int64_t at,
                std::int64_t width) {
  auto* to = reinterpret_cast<std::uint16_t*>(block);
  for (std::int64_t d = 0; d < dim; ++d) to[Place(d, at, width)] = float_to_bf16(values[d]);
}

template <auto Place>
void store_int8(std::uint8_t* block, const float* values, std::int64_t dim, std::int64_t at,
                std::int64_t width, int offset, float* scale) {
  *scale = scale_of(values, dim);
  // Codes do not matter, because every result with this scale is NaN.
  if (std::isnan(*scale)) return;
  const float factor = *scale > kSmallestScale ? 1.0f / *scale : 0.0f;
  for (std::int64_t d = 0; d < dim; ++d)
    block[Place(d, at, width)] =
        static_cast<std::uint8_t>(std::lrint(values[d] * factor) + offset);
}

}  // namespace

void append_key(const KvLayout& layout, std::uint8_t* blocks, std::int64_t position,
                const float* key) {
  std::uint8_t* block = blocks + position / kKvBlock * layout.key_block_bytes();
  const std::int64_t at = position % kKvBlock, dim = layout.key_dim, width = layout.key_width();
  if (at == 0) clear(block, layout.key_block_bytes());
  switch (layout.type) {
    case KvType::kFp32: return store_fp32<key_place<1>>(block, key, dim, at, width);
    case KvType::kBf16: return store_bf16<key_place<2>>(block, key, dim, at, width);
    case KvType::kInt8:
      store_int8<key_place<4>>(block, key, dim, at, width, kKeyOffset,
                               reinterpret_cast<float*>(block + layout.key_bytes()) + at);
  }
}

void append_value(const KvLayout& layout, std::uint8_t* blocks, std::int64_t position,
                  const float* value) {
  std::uint8_t* block = blocks + position / kKvBlock * layout.value_block_bytes();
  const std::int64_t at = position % kKvBlock, dim = layout.value_dim;
  const std::int64_t width = layout.value_width();
  if (at == 0) clear(block, layout.value_block_bytes());
  switch (layout.type) {
    case KvType::kFp32: return store_fp32<value_place<1>>(block, value, dim, at, width);
    case KvType::kBf16: return store_bf16<value_place<2>>(block, value, dim, at, width);
    case KvType::kInt8:
      store_int8<value_place<4>>(block, value, dim, at, width, 0,
                                 reinterpret_cast<float*>(block + layout.value_bytes()) + at);
  }
}

void write_joint(const KvLayout& layout, std::uint8_t* to, const float* key) {
  const std::int64_t dim = layout.key_dim;
  clear(to, layout.joint_bytes());
  switch (layout.type) {
    case KvType::kFp32: return store_values(key, dim, ValueType::kFp32, to);
    case KvType::kBf16: return store_values(key, dim, ValueType::kBf16, to);
    case KvType::kInt8: {
      float scale;
      store_int8<joint_place>(to, key, dim, 0, 0, 0, &scale);
      std::memcpy(to + layout.joint_values(), &scale, sizeof scale);
    }
  }
}

}  // namespace tandem
