#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "blocks.hpp"
#include "half.hpp"

namespace tandem {
namespace {

// Codes of a row with words of its own, from column `col` on; `count` fills whole words.
void read_words(const Fields& f, int bits, const std::uint8_t* row, std::int64_t col,
                std::int64_t count, std::uint8_t* codes) {
  std::uint8_t bytes[kStripCols];
  const std::uint8_t* from = row + col * bits / 32 * f.word_stride;
  const std::int64_t num_bytes = count * bits / 8;
  for (std::int64_t i = 0; i < num_bytes; i += 4, from += f.word_stride)
    std::memcpy(bytes + i, from, 4);
  if (bits == 8) {
    for (std::int64_t i = 0; i < count; ++i) codes[i] = bytes[i] ^ f.flip;
    return;
  }
  for (std::int64_t i = 0; i < num_bytes; ++i) {
    codes[2 * i] = (bytes[i] & 15) ^ f.flip;
    codes[2 * i + 1] = (bytes[i] >> 4) ^ f.flip;
  }
}

// Codes of eight rows that share words.
void read_shared_words(const Fields& f, const std::uint8_t* row, std::int64_t col,
                       std::int64_t count, Strip* rows) {
  const std::uint8_t* from = row + col * f.word_stride;
  for (std::int64_t i = 0; i < count; ++i, from += f.word_stride) {
    const std::uint32_t word = word_at(from);
    for (int r = 0; r < 8; ++r)
      rows[r].codes[i] =
          static_cast<std::uint8_t>((word >> 4 * (f.places >> 4 * r & 15) & 15) ^ f.flip);
  }
}

bool has_e4m3_nan(const std::uint8_t* codes) {
  bool found = false;
  for (std::int64_t i = 0; i < kStripCols; ++i) found |= (codes[i] & kE4m3Nan) == kE4m3Nan;
  return found;
}

// Reads 32 columns of 16 rows; columns after the last are padding. Returns false for NaN codes.
bool read_strips(const Rearrangement& work, std::int64_t first, std::int64_t col,
                 Strip (&rows)[kBlockRows]) {
  const Fields& f = work.fields;
  const Encoding& e = encoding(work.format);
  const std::int64_t num_rows = std::min(kBlockRows, work.rows - first);
  const std::int64_t count = std::min(kStripCols, work.cols - col);
  if (num_rows < kBlockRows || count < kStripCols)
    std::fill(std::begin(rows), std::end(rows), padding<Strip>(e));
  if (count <= 0) return true;
  bool is_whole = true;
  for (std::int64_t r = 0; r < num_rows; r += f.places == 0 ? 1 : 8) {
    if (f.places != 0)
      read_shared_words(f, work.source + (first + r) / 8 * f.row_stride, col, count, rows + r);
    else
      read_words(f, e.bits, work.source + (first + r) * f.row_stride, col, count, rows[r].codes);
    is_whole &= work.format != Format::kFp8 || !has_e4m3_nan(rows[r].codes);
  }
  return is_whole;
}

float number_at(NumberType type, const std::uint8_t* at) {
  float value;
  if (type == NumberType::kBf16) return bf16_to_float(half_bits(at));
  if (type == NumberType::kFp16) return half_to_float(half_bits(at));
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Writes a number as fp16; returns false if it is not finite or not exact in fp16.
bool write_half(float value, std::uint8_t* out) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t size = bits & 0x7FFFFFFF;
  std::uint32_t half = (size - (112u << 23)) >> 13;
  bool is_exact = size < 143u << 23 && (size & 0x1FFF) == 0;
  if (size < 113u << 23) {  // subnormal in fp16: multiples of 2^-24
    const float steps = std::fabs(value) * 0x1p24f;
    half = static_cast<std::uint32_t>(steps);
    is_exact = static_cast<float>(half) == steps;
  }
  const auto stored = static_cast<std::uint16_t>(half | (bits >> 16 & 0x8000));
  std::memcpy(out, &stored, sizeof stored);
  return is_exact;
}

// Writes a number as the format stores it; returns false if it cannot.
bool write_number(NumberType type, const std::uint8_t* at, ScaleKind kind, std::uint8_t* out) {
  if (type == NumberType::kByte) {
    *out = *at;
    return kind == ScaleKind::kE8m0 ? *at <= kLargestE8m0 : (*at & kE4m3Nan) != kE4m3Nan;
  }
  if (kind == ScaleKind::kFp16 && type == NumberType::kFp16) {
    std::memcpy(out, at, 2);
    return is_finite(half_bits(at));
  }
  const float value = number_at(type, at);
  if (kind == ScaleKind::kFp16) return write_half(value, out);
  std::memcpy(out, &value, sizeof value);
  return std::isfinite(value);
}

// Size of a number as a format stores it.
std::int64_t number_bytes(ScaleKind kind) {
  return kind == ScaleKind::kFp16 ? 2 : kind == ScaleKind::kFp32OfBlock ? 4 : 1;
}

// Writes a group's numbers for 16 rows (one if the block shares it); padding is zero.
bool write_line(const Rearrangement& work, const Numbers& numbers, std::int64_t block,
                std::int64_t group, std::uint8_t* out) {
  const ScaleKind kind = encoding(work.format).scale;
  const std::int64_t num_scales = kind == ScaleKind::kFp32OfBlock ? 1 : kBlockRows;
  const std::int64_t bytes = number_bytes(kind), first = block * kBlockRows;
  const bool is_there = group * work.fields.group < work.cols;
  const std::int64_t count = is_there ? std::min(num_scales, work.rows - first) : 0;
  const std::uint8_t* at = numbers.at + first / work.fields.scale_rows * numbers.row_stride +
                           group / work.fields.repeats * numbers.group_stride;
  bool is_whole = true;
  for (std::int64_t r = 0; r < count; ++r)
    is_whole &= write_number(numbers.type, at + r * numbers.row_stride, kind, out + r * bytes);
  std::memset(out + count * bytes, 0, static_cast<std::size_t>((num_scales - count) * bytes));
  return is_whole;
}

bool write_field_scales(const Rearrangement& work, std::int64_t block, std::int64_t cols) {
  const Fields& f = work.fields;
  const Encoding& e = encoding(work.format);
  std::uint8_t* out = work.scales + block * work.scale_stride;
  bool is_whole = true;
  if (e.scale == ScaleKind::kE4m3OfRow) {
    is_whole = write_factors(work, block, out);
    out += kRowFactorBytes;
  }
  const std::int64_t num_scales = e.scale == ScaleKind::kFp32OfBlock ? 1 : kBlockRows;
  const std::int64_t line = num_scales * number_bytes(e.scale);
  for (std::int64_t g = 0; g < cols / f.group; ++g) {
    is_whole &= write_line(work, f.scales, block, g, out);
    out += line;
    if (!e.has_minima) continue;
    is_whole &= write_line(work, f.minima, block, g, out);
    out += line;
  }
  return is_whole;
}

}  // namespace

bool write_factors(const Rearrangement& work, std::int64_t block, std::uint8_t* out) {
  const float factor = work.factor == nullptr ? 1.0f : *work.factor;
  for (std::int64_t r = 0; r < kBlockRows; ++r) {
    const float own = block * kBlockRows + r < work.rows ? factor : 0.0f;
    std::memcpy(out + 4 * r, &own, sizeof own);
  }
  return std::isfinite(factor);
}

bool rearrange_fields(const Rearrangement& work, std::int64_t block) {
  const Encoding& e = encoding(work.format);
  const std::int64_t width = std::max(kStripCols, work.fields.group);
  const std::int64_t cols = (work.cols + width - 1) / width * width;
  std::uint8_t* data = work.data + block * work.data_stride;
  bool is_whole = true;
  Strip rows[kBlockRows];
  for (std::int64_t col = 0; col < cols; col += kStripCols) {
    is_whole &= read_strips(work, block * kBlockRows, col, rows);
    write_codes(rows, e, data + col * kBlockRows * e.bits / 8);
  }
  return write_field_scales(work, block, cols) && is_whole;
}

}  // namespace tandem
