// Sixteen rows of codes and scales in the form of their sources, written as a block of a packed
// matrix.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "packed.hpp"

namespace tandem {

// 32 numbers of one row: unsigned codes, the bits of an fp16 or e8m0 scale, and a minimum.
struct Strip {
  static constexpr std::int64_t kCols = kStripCols;
  std::uint8_t codes[kCols];
  std::uint16_t scales[2];
};

// 64 numbers of one row with an e4m3 scale per 16.
struct Sixteens {
  static constexpr std::int64_t kCols = 64;
  std::uint8_t codes[kCols];
  std::uint8_t scales[4];
};

// 256 numbers of one row: unsigned codes, the bytes of each group's scale and minimum, and fp16
// factors.
struct Super {
  static constexpr std::int64_t kCols = kSuperCols;
  std::uint8_t codes[kCols];
  std::int8_t scales[16];
  std::int8_t minima[16];
  std::uint16_t factors[2];
};

// 256 numbers of one row whose codes are lines of a grid: its words, and an fp16 factor.
struct Lines {
  static constexpr std::int64_t kCols = kSuperCols;
  std::uint32_t words[27];
  std::uint16_t factor;
};

// Larger e8m0 scales are NaN, or numbers would leave fp32's range.
constexpr std::uint16_t kLargestE8m0 = 252;
constexpr std::uint8_t kE4m3Nan = 0x7F;  // without the sign

inline std::uint16_t half_bits(const std::uint8_t* at) {
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}

inline std::uint32_t word_at(const std::uint8_t* at) {
  std::uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

inline bool is_finite(std::uint16_t half) { return (half & 0x7C00) != 0x7C00; }

// Joins fields of `Width` bits, one per byte, from 8 / Width consecutive dwords of codes.
template <int Width>
std::uint32_t joined(const std::uint8_t* codes, int shift) {
  constexpr std::uint32_t kMask = 0x01010101u * ((1u << Width) - 1);
  std::uint32_t word = 0;
  for (int place = 0; place < 8 / Width; ++place) {
    std::uint32_t four;
    std::memcpy(&four, codes + 4 * place, sizeof four);
    word |= (four >> shift & kMask) << Width * place;
  }
  return word;
}

template <int Width, class Row>
void write_plane(const Row (&rows)[kBlockRows], std::int64_t col, int shift, std::uint8_t* out) {
  for (int line = 0; line < Width; ++line)
    for (int r = 0; r < kBlockRows; ++r) {
      const std::uint32_t word = joined<Width>(rows[r].codes + col + 32 / Width * line, shift);
      std::memcpy(out + 64 * line + 4 * r, &word, sizeof word);
    }
}

inline void write_codes(const Lines (&rows)[kBlockRows], const Encoding& e, std::uint8_t* out) {
  for (int word = 0; word < e.grid->words; ++word)
    for (int r = 0; r < kBlockRows; ++r, out += 4) std::memcpy(out, &rows[r].words[word], 4);
}

template <class Row>
void write_codes(const Row (&rows)[kBlockRows], const Encoding& e, std::uint8_t* out) {
  const int bits = e.bits;
  for (std::int64_t col = 0; col < std::ssize(rows[0].codes); col += kStripCols) {
    for (int done = 0; done < bits;) {
      const int width = static_cast<int>(std::bit_floor(static_cast<unsigned>(bits - done)));
      switch (width) {
        case 8: write_plane<8>(rows, col, done, out); break;
        case 4: write_plane<4>(rows, col, done, out); break;
        case 2: write_plane<2>(rows, col, done, out); break;
        default: write_plane<1>(rows, col, done, out);
      }
      out += 64 * width;
      done += width;
    }
  }
}

inline void write_scales(const Super (&rows)[kBlockRows], const Encoding& e, std::uint8_t* out) {
  const int lines = e.has_minima ? 2 : 1;
  const std::int64_t groups = kSuperCols / e.group;
  for (int line = 0; line < lines; ++line)
    for (int r = 0; r < kBlockRows; ++r)
      std::memcpy(out + 32 * line + 2 * r, &rows[r].factors[line], 2);
  out += 32 * lines;
  const bool are_nibbles = e.scale == ScaleKind::kNibblesOfSuper;
  for (std::int64_t g = 0; g < groups; ++g, out += are_nibbles ? 16 : 16 * lines)
    for (int r = 0; r < kBlockRows; ++r) {
      out[r] = static_cast<std::uint8_t>(rows[r].scales[g]);
      if (are_nibbles)
        out[r] |= static_cast<std::uint8_t>(rows[r].minima[g] << 4);
      else if (e.has_minima)
        out[16 + r] = static_cast<std::uint8_t>(rows[r].minima[g]);
    }
}

inline void write_scales(const Strip (&rows)[kBlockRows], const Encoding& e, std::uint8_t* out) {
  for (int r = 0; r < kBlockRows; ++r) {
    if (e.scale == ScaleKind::kE8m0)
      out[r] = static_cast<std::uint8_t>(rows[r].scales[0]);
    else
      std::memcpy(out + 2 * r, &rows[r].scales[0], 2);
    if (e.has_minima) std::memcpy(out + 32 + 2 * r, &rows[r].scales[1], 2);
  }
}

inline void write_scales(const Sixteens (&rows)[kBlockRows], const Encoding&, std::uint8_t* out) {
  for (std::int64_t g = 0; g < std::ssize(rows[0].scales); ++g, out += kBlockRows)
    for (int r = 0; r < kBlockRows; ++r) out[r] = rows[r].scales[g];
}

inline void write_scales(const Lines (&rows)[kBlockRows], const Encoding& e, std::uint8_t* out) {
  if (e.grid->factor.width > 0) return;
  for (int r = 0; r < kBlockRows; ++r) std::memcpy(out + 2 * r, &rows[r].factor, 2);
}

// A row of padding: zeros.
template <class Row>
Row padding(const Encoding& e) {
  Row zeros{};
  if constexpr (!std::is_same_v<Row, Lines>)
    std::memset(zeros.codes, e.table == nullptr ? e.offset : 0, sizeof zeros.codes);
  return zeros;
}

inline bool are_finite(const Super& row, const Encoding& e) {
  return is_finite(row.factors[0]) && (!e.has_minima || is_finite(row.factors[1]));
}

inline bool are_finite(const Strip& row, const Encoding& e) {
  if (e.scale == ScaleKind::kE8m0) return row.scales[0] <= kLargestE8m0;
  return is_finite(row.scales[0]) && (!e.has_minima || is_finite(row.scales[1]));
}

inline bool are_finite(const Lines& row, const Encoding&) { return is_finite(row.factor); }

inline bool are_finite(const Sixteens&, const Encoding&) { return true; }

}  // namespace tandem
