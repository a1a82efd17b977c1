#include "blocks.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

#include "pieces.hpp"

namespace tandem {
namespace {

// 32 numbers of one row: unsigned codes, the bits of an fp16 scale, or of an e8m0 one, and a minimum.
struct Strip {
  std::uint8_t codes[kStripCols];
  std::uint16_t scales[2];
};

// 256 numbers of one row: unsigned codes, bytes of each group's scale and minimum, fp16 factors.
struct Super {
  std::uint8_t codes[kSuperCols];
  std::int8_t scales[16];
  std::int8_t minima[16];
  std::uint16_t factors[2];
};

std::uint16_t half_bits(const std::uint8_t* at) {
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}

// Beyond it a scale is NaN or its numbers leave fp32.
constexpr std::uint16_t kLargestE8m0 = 252;

bool is_finite(std::uint16_t half) { return (half & 0x7C00) != 0x7C00; }

// Nibbles of 16 bytes: the lower ones first.
void read_nibbles(const std::uint8_t* bytes, std::uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[16 + i] = bytes[i] >> 4;
  }
}

// The same with a fifth bit for each, in four bytes.
void read_fives(const std::uint8_t* fifth, const std::uint8_t* bytes, std::uint8_t* codes) {
  std::uint32_t bits;
  std::memcpy(&bits, fifth, sizeof bits);
  read_nibbles(bytes, codes);
  for (int i = 0; i < kStripCols; ++i)
    codes[i] = static_cast<std::uint8_t>(codes[i] | (bits >> i & 1) << 4);
}

void read_q4_0(const std::uint8_t* block, Strip& out) {
  read_nibbles(block + 2, out.codes);
  out.scales[0] = half_bits(block);
}

void read_q4_1(const std::uint8_t* block, Strip& out) {
  read_nibbles(block + 4, out.codes);
  out.scales[0] = half_bits(block);
  out.scales[1] = half_bits(block + 2);
}

void read_q5_0(const std::uint8_t* block, Strip& out) {
  read_fives(block + 2, block + 6, out.codes);
  out.scales[0] = half_bits(block);
}

void read_q5_1(const std::uint8_t* block, Strip& out) {
  read_fives(block + 4, block + 8, out.codes);
  out.scales[0] = half_bits(block);
  out.scales[1] = half_bits(block + 2);
}

void read_q8_0(const std::uint8_t* block, Strip& out) {
  for (int i = 0; i < kStripCols; ++i) out.codes[i] = block[2 + i] ^ 0x80;
  out.scales[0] = half_bits(block);
}

void read_mxfp4(const std::uint8_t* block, Strip& out) {
  read_nibbles(block + 1, out.codes);
  out.scales[0] = block[0];
}

// Eight scales and minima of 6 bits in 12 bytes; a minimum is subtracted, so its factor's sign turns.
void read_scales(const std::uint8_t* block, Super& out) {
  const std::uint8_t* low = block + 4;
  const std::uint8_t* middle = block + 8;
  const std::uint8_t* high = block + 12;
  for (int i = 0; i < 4; ++i) {
    out.scales[i] = static_cast<std::int8_t>(low[i] & 63);
    out.minima[i] = static_cast<std::int8_t>(middle[i] & 63);
    out.scales[4 + i] = static_cast<std::int8_t>((high[i] & 15) | (low[i] >> 6) << 4);
    out.minima[4 + i] = static_cast<std::int8_t>((high[i] >> 4) | (middle[i] >> 6) << 4);
  }
  out.factors[0] = half_bits(block);
  out.factors[1] = half_bits(block + 2) ^ 0x8000;
}

void read_q4k(const std::uint8_t* block, Super& out) {
  read_scales(block, out);
  for (int part = 0; part < 4; ++part)
    for (int i = 0; i < 32; ++i) {
      const std::uint8_t byte = block[16 + 32 * part + i];
      out.codes[64 * part + i] = byte & 15;
      out.codes[64 * part + 32 + i] = byte >> 4;
    }
}

void read_q5k(const std::uint8_t* block, Super& out) {
  read_scales(block, out);
  for (int part = 0; part < 4; ++part)
    for (int i = 0; i < 32; ++i) {
      const std::uint8_t byte = block[48 + 32 * part + i];
      const int fifth = block[16 + i] >> 2 * part;
      out.codes[64 * part + i] = static_cast<std::uint8_t>((byte & 15) | (fifth & 1) << 4);
      out.codes[64 * part + 32 + i] = static_cast<std::uint8_t>(byte >> 4 | (fifth >> 1 & 1) << 4);
    }
}

void read_q6k(const std::uint8_t* block, Super& out) {
  for (int part = 0; part < 2; ++part)
    for (int i = 0; i < 64; ++i) {
      const std::uint8_t byte = block[64 * part + i];
      const int upper = block[128 + 32 * part + i % 32] >> (i < 32 ? 0 : 2);
      std::uint8_t* codes = out.codes + 128 * part + i;
      codes[0] = static_cast<std::uint8_t>((byte & 15) | (upper & 3) << 4);
      codes[64] = static_cast<std::uint8_t>(byte >> 4 | (upper >> 4 & 3) << 4);
    }
  std::memcpy(out.scales, block + 192, 16);
  out.factors[0] = half_bits(block + 208);
}

void read_q2k(const std::uint8_t* block, Super& out) {
  for (int i = 0; i < kSuperCols; ++i)
    out.codes[i] = block[16 + i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
  for (int g = 0; g < 16; ++g) {
    out.scales[g] = static_cast<std::int8_t>(block[g] & 15);
    out.minima[g] = static_cast<std::int8_t>(block[g] >> 4);
  }
  out.factors[0] = half_bits(block + 80);
  out.factors[1] = half_bits(block + 82) ^ 0x8000;
}

void read_q3k(const std::uint8_t* block, Super& out) {
  for (int i = 0; i < kSuperCols; ++i) {
    const int low = block[32 + i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
    out.codes[i] = static_cast<std::uint8_t>(low | (block[i % 32] >> i / 32 & 1) << 2);
  }
  for (int g = 0; g < 16; ++g) {
    const int low = block[96 + g % 8] >> 4 * (g / 8) & 15;
    const int high = block[104 + g % 4] >> 2 * (g / 4) & 3;
    out.scales[g] = static_cast<std::int8_t>((low | high << 4) - 32);
  }
  out.factors[0] = half_bits(block + 108);
}

void read_iq4xs(const std::uint8_t* block, Super& out) {
  for (int g = 0; g < 8; ++g) {
    for (int i = 0; i < 16; ++i) {
      const std::uint8_t byte = block[8 + 16 * g + i];
      out.codes[32 * g + i] = byte & 15;
      out.codes[32 * g + 16 + i] = byte >> 4;
    }
    const int low = block[4 + g / 2] >> 4 * (g % 2) & 15;
    const int high = block[2 + g / 4] >> 2 * (g % 4) & 3;
    out.scales[g] = static_cast<std::int8_t>((low | high << 4) - 32);
  }
  out.factors[0] = half_bits(block);
}

struct Reader {
  std::int64_t bytes;
  void (*read)(const std::uint8_t* block, Super& out);
  void (*read_strip)(const std::uint8_t* block, Strip& out);

  std::int64_t cols() const { return read_strip == nullptr ? kSuperCols : kStripCols; }
};

Reader reader_of(Format format) {
  switch (format) {
    case Format::kInt4: return {18, nullptr, read_q4_0};
    case Format::kInt4Zero: return {20, nullptr, read_q4_1};
    case Format::kInt5: return {22, nullptr, read_q5_0};
    case Format::kInt5Zero: return {24, nullptr, read_q5_1};
    case Format::kInt8: return {34, nullptr, read_q8_0};
    case Format::kMxfp4: return {17, nullptr, read_mxfp4};
    case Format::kIq4Nl: return {18, nullptr, read_q4_0};
    case Format::kQ4K: return {144, read_q4k, nullptr};
    case Format::kQ5K: return {176, read_q5k, nullptr};
    case Format::kQ6K: return {210, read_q6k, nullptr};
    case Format::kQ2K: return {84, read_q2k, nullptr};
    case Format::kQ3K: return {110, read_q3k, nullptr};
    case Format::kIq4Xs: return {136, read_iq4xs, nullptr};
    default: return {0, nullptr, nullptr};
  }
}

// Joins fields of `Width` bits, one of each byte, from 8 / Width neighbouring dwords of codes.
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

template <class Row>
void write_codes(const Row (&rows)[kBlockRows], int bits, std::uint8_t* out) {
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

void write_scales(const Super (&rows)[kBlockRows], const Encoding& e, std::uint8_t* out) {
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

void write_scales(const Strip (&rows)[kBlockRows], const Encoding& e, std::uint8_t* out) {
  for (int r = 0; r < kBlockRows; ++r) {
    if (e.scale == ScaleKind::kE8m0)
      out[r] = static_cast<std::uint8_t>(rows[r].scales[0]);
    else
      std::memcpy(out + 2 * r, &rows[r].scales[0], 2);
    if (e.has_minima) std::memcpy(out + 32 + 2 * r, &rows[r].scales[1], 2);
  }
}

// A row of padding: zeros.
template <class Row>
Row padding(const Encoding& e) {
  Row zeros{};
  std::memset(zeros.codes, e.table == nullptr ? e.offset : 0, sizeof zeros.codes);
  return zeros;
}

bool are_finite(const Super& row, const Encoding& e) {
  return is_finite(row.factors[0]) && (!e.has_minima || is_finite(row.factors[1]));
}

bool are_finite(const Strip& row, const Encoding& e) {
  if (e.scale == ScaleKind::kE8m0) return row.scales[0] <= kLargestE8m0;
  return is_finite(row.scales[0]) && (!e.has_minima || is_finite(row.scales[1]));
}

// Writes 16 rows, the columns of a `Row` at a time; false if a scale is not finite.
template <class Row>
bool rearrange_rows(const Rearrangement& work, std::int64_t block, std::int64_t block_bytes,
                    void (*read)(const std::uint8_t* block, Row& out)) {
  const Encoding& e = encoding(work.format);
  Row rows[kBlockRows];
  const std::int64_t cols = std::ssize(rows[0].codes), steps = work.cols / cols;
  const std::int64_t group = e.group == 0 ? cols : e.group;
  std::uint8_t* data = work.data + block * work.data_stride;
  std::uint8_t* scales = work.scales + block * work.scale_stride;
  bool is_whole = true;
  for (std::int64_t s = 0; s < steps; ++s) {
    for (std::int64_t r = 0; r < kBlockRows; ++r) {
      const std::int64_t row = block * kBlockRows + r;
      if (row >= work.rows) {
        rows[r] = padding<Row>(e);
        continue;
      }
      const std::int64_t from = work.order ? work.order[row] : row;
      read(work.source + (from * steps + s) * block_bytes, rows[r]);
      is_whole &= are_finite(rows[r], e);
    }
    write_codes(rows, e.bits, data + s * code_bytes(work.format, cols));
    write_scales(rows, e, scales + s * scale_bytes(work.format, cols, group));
  }
  return is_whole;
}

bool rearrange_block(const Rearrangement& work, std::int64_t block) {
  const Reader reader = reader_of(work.format);
  return reader.read_strip == nullptr
             ? rearrange_rows(work, block, reader.bytes, reader.read)
             : rearrange_rows(work, block, reader.bytes, reader.read_strip);
}

// Where a piece's blocks lie; of rows in another order, where all of them lie.
Extent source_of(const Piece<Rearrangement>& piece) {
  const Rearrangement& work = *piece.call;
  const Reader reader = reader_of(work.format);
  const std::int64_t row_bytes = work.cols / reader.cols() * reader.bytes;
  if (work.order != nullptr) return {work.source, work.rows * row_bytes};
  const std::int64_t first = piece.first * kBlockRows;
  const std::int64_t count = std::min(work.rows - first, piece.count * kBlockRows);
  return {work.source + first * row_bytes, count * row_bytes};
}

}  // namespace

std::int64_t source_bytes(Format format) { return reader_of(format).bytes; }

std::int64_t source_cols(Format format) { return reader_of(format).cols(); }

bool rearrange(std::span<const Rearrangement> works, int num_threads) {
  return do_pieces(works, num_threads, source_of, rearrange_block);
}

}  // namespace tandem
