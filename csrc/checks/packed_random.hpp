// Random packed matrices of every format, in buffers of exactly the necessary size.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "half.hpp"
#include "packed.hpp"
#include "random.hpp"

namespace tandem::checks {

// Columns that share a scale; 0 for formats without scales.
inline std::int64_t random_group(Random& random, Format format) {
  if (encoding(format).scale == ScaleKind::kNone) return 0;
  return encoding(format).group != 0 ? encoding(format).group : 32 << random.between(0, 2);
}

// The multiple to which columns are padded.
inline std::int64_t column_multiple(Format format, std::int64_t group) {
  if (has_supers(format)) return kSuperCols;
  return group == 0 ? 8 : std::max(group, kStripCols);
}

inline void put_half(Random& random, std::uint8_t* at) {  // 1/256 .. 1/128
  const auto bits = static_cast<std::uint16_t>(0x1C00 + random.between(0, 0x3FF));
  std::memcpy(at, &bits, sizeof bits);
}

inline void fill_codes(Random& random, Format format, std::uint8_t* data, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; ++i) data[i] = static_cast<std::uint8_t>(random.between(0, 255));
  if (format == Format::kFp8)
    for (std::int64_t i = 0; i < bytes; ++i) data[i] = (data[i] & 0x7F) == 0x7F ? 0 : data[i];  // NaN
  if (format == Format::kIq1M)  // its factors are among the codes: set the exponents' upper bits
    for (std::int64_t super = 0; super < bytes; super += code_bytes(format, kSuperCols))
      for (std::int64_t row = 0; row < kBlockRows; ++row) {
        std::uint8_t& byte = data[super + kIq1M.factor.at(3) / 32 * 64 + 4 * row + 3];
        byte = static_cast<std::uint8_t>((byte & 15) | 0x10);
      }
  if (format != Format::kBf16 && format != Format::kFp16) return;
  const std::uint8_t exponent = format == Format::kBf16 ? 0x3C : 0x28;  // numbers of middle size
  for (std::int64_t i = 1; i < bytes; i += 2)
    data[i] = static_cast<std::uint8_t>((data[i] & 0x83) | exponent);
}

// `bytes` is the size of whole blocks of `cols` columns.
inline void fill_scales(Random& random, Format format, std::int64_t group, std::int64_t cols,
                        std::uint8_t* scales, std::int64_t bytes) {
  const std::int64_t super = bytes == 0 ? 0 : scale_bytes(format, kSuperCols, group);
  const std::int64_t factors = encoding(format).has_minima ? 64 : 32;
  switch (encoding(format).scale) {
    case ScaleKind::kNone:
    case ScaleKind::kFp32:
      return;
    case ScaleKind::kOfGrid:
    case ScaleKind::kFp16:
      for (std::int64_t i = 0; i < bytes; i += 2) put_half(random, scales + i);
      return;
    case ScaleKind::kE8m0:
      for (std::int64_t i = 0; i < bytes; ++i)
        scales[i] = static_cast<std::uint8_t>(random.between(118, 124));
      return;
    case ScaleKind::kFp32OfBlock:
      for (std::int64_t i = 0; i < bytes; i += 4) {
        const float scale = (std::fabs(random.normal()) + 0.01f) / 4096;
        std::memcpy(scales + i, &scale, sizeof scale);
      }
      return;
    case ScaleKind::kE4m3OfRow:
      for (std::int64_t i = 0; i < bytes; ++i)
        scales[i] = static_cast<std::uint8_t>(random.between(0, 0x38));
      for (std::int64_t b = 0; b < bytes; b += scale_bytes(format, cols, group))
        for (std::int64_t i = 0; i < kRowFactorBytes; i += 4) {
          const float factor = (std::fabs(random.normal()) + 0.01f) / 64;
          std::memcpy(scales + b + i, &factor, sizeof factor);
        }
      return;
    case ScaleKind::kNibblesOfSuper:
    case ScaleKind::kInt8OfSuper:
      for (std::int64_t i = 0; i < bytes; ++i)
        scales[i] = static_cast<std::uint8_t>(random.between(0, 255));
      for (std::int64_t s = 0; s < bytes; s += super)
        for (std::int64_t i = 0; i < factors; i += 2) put_half(random, scales + s + i);
  }
}

}  // namespace tandem::checks
