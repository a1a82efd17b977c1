// Random routed layers of bf16 experts in the packed layout, with their weights in fp32.
#pragma once

#include <cstring>
#include <vector>

#include "half.hpp"
#include "random.hpp"
#include "routed.hpp"
#include "values.hpp"

namespace tandem::checks {

// fp32 numbers as a tensor of some type, and converted back to fp32.
struct Values {
  std::vector<std::uint8_t> bytes;
  std::vector<float> numbers;

  Values(std::vector<float> from, ValueType type)
      : bytes(from.size() * tandem::value_bytes(type)), numbers(std::move(from)) {
    const auto count = static_cast<std::int64_t>(numbers.size());
    if (count == 0) return;
    tandem::store_values(numbers.data(), count, type, bytes.data());
    tandem::load_values(bytes.data(), type, count, numbers.data());
  }
};

// Packs bf16 weights (rows, cols) in blocks of 16 rows; see docs/formats.md.
inline std::vector<std::uint8_t> packed_bf16(const std::vector<float>& weights,
                                             std::int64_t rows, std::int64_t cols,
                                             std::int64_t padded_cols) {
  const std::int64_t blocks = (rows + 15) / 16;
  std::vector<std::uint8_t> data(blocks * 16 * padded_cols * 2);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t k = 0; k < cols; ++k) {
      const std::uint16_t bits = tandem::float_to_bf16(weights[r * cols + k]);
      const std::int64_t chunk = r / 16 * (padded_cols / 2) + k / 2;
      std::memcpy(data.data() + chunk * 64 + 4 * (r % 16) + 2 * (k % 2), &bits, 2);
    }
  return data;
}

// A layer of bf16 experts without a gate: relu(x U)^2 D.
struct Layer {
  std::int64_t hidden, inner, count;
  std::vector<std::vector<float>> up, down;
  std::vector<std::uint8_t> bytes;
  tandem::RoutedLayer routed;
};

inline Layer make_layer(Random& random, std::int64_t hidden, std::int64_t count) {
  Layer l{hidden, 16 * random.between(1, 6), count, {}, {}, {}, {}};
  tandem::ExpertLayout layout{};
  layout.up = {static_cast<int>(Format::kBf16), 0, l.hidden, 0, 0, -1};
  layout.down = {static_cast<int>(Format::kBf16), 0, l.inner, 0, 0, -1};
  layout.hidden_size = l.hidden;
  layout.inner_rows = l.inner;
  for (std::int64_t e = 0; e < l.count; ++e) {
    l.up.push_back(Values(random.normals(l.inner * l.hidden, 0.1f), ValueType::kBf16).numbers);
    l.down.push_back(Values(random.normals(l.hidden * l.inner, 0.1f), ValueType::kBf16).numbers);
    const auto up = packed_bf16(l.up.back(), l.inner, l.hidden, l.hidden);
    const auto down = packed_bf16(l.down.back(), l.hidden, l.inner, l.inner);
    layout.down.data = static_cast<std::int64_t>(up.size());
    l.bytes.insert(l.bytes.end(), up.begin(), up.end());
    l.bytes.insert(l.bytes.end(), down.begin(), down.end());
  }
  const auto size = static_cast<std::int64_t>(l.bytes.size()) / l.count;
  l.routed = {layout, {tandem::Activation::kRelu2, 1, 1, 0}, l.count, l.bytes.data(), size, size};
  return l;
}

}  // namespace tandem::checks
