#include "kv_layout.hpp"

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

constexpr float kLargest = 127.0f;

float peak_of(const float* values, std::int64_t count) {
  float peak = 0;
  for (std::int64_t i = 0; i < count; ++i) peak = std::max(peak, std::fabs(values[i]));
  return peak;
}

// Stores values[d] for d < dim at to[place(d)], zeros up to `width`; int8 with a scale.
template <typename Place>
void store_packed(const KvLayout& layout, std::uint8_t* block, const float* values,
                  std::int64_t dim, std::int64_t width, int offset, float* scale,
                  const Place& place) {
  const auto value = [&](std::int64_t d) { return d < dim ? values[d] : 0.0f; };
  switch (layout.type) {
    case KvType::kFp32: {
      auto* to = reinterpret_cast<float*>(block);
      for (std::int64_t d = 0; d < width; ++d) to[place(d)] = value(d);
      break;
    }
    case KvType::kBf16: {
      auto* to = reinterpret_cast<std::uint16_t*>(block);
      for (std::int64_t d = 0; d < width; ++d) to[place(d)] = float_to_bf16(value(d));
      break;
    }
    case KvType::kInt8: {
      const float peak = peak_of(values, dim);
      const float factor = peak > 1e-30f ? kLargest / peak : 0.0f;
      *scale = peak / kLargest;
      for (std::int64_t d = 0; d < width; ++d)
        block[place(d)] = static_cast<std::uint8_t>(std::lrint(value(d) * factor) + offset);
    }
  }
}

}  // namespace

void append_key(const KvLayout& layout, std::uint8_t* blocks, std::int64_t position,
                const float* key) {
  std::uint8_t* block = blocks + position / kKvBlock * layout.key_block_bytes();
  const std::int64_t at = position % kKvBlock, pack = layout.pack();
  if (at == 0) std::fill_n(block, layout.key_block_bytes(), 0);
  auto* scales = reinterpret_cast<float*>(block + layout.key_bytes());
  store_packed(layout, block, key, layout.key_dim, layout.key_width(), kKeyOffset, scales + at,
               [&](std::int64_t d) { return (d / pack * kKvBlock + at) * pack + d % pack; });
}

void append_value(const KvLayout& layout, std::uint8_t* blocks, std::int64_t position,
                  const float* value) {
  std::uint8_t* block = blocks + position / kKvBlock * layout.value_block_bytes();
  const std::int64_t at = position % kKvBlock, pack = layout.pack();
  if (at == 0) std::fill_n(block, layout.value_block_bytes(), 0);
  auto* scales = reinterpret_cast<float*>(block + layout.value_bytes());
  const std::int64_t row = at / pack * layout.value_width();
  store_packed(layout, block, value, layout.value_dim, layout.value_width(), 0, scales + at,
               [&](std::int64_t d) { return (row + d) * pack + at % pack; });
}

}  // namespace tandem
