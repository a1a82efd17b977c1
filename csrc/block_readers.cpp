#include "block_readers.hpp"

#include <bit>
#include <cstring>

namespace tandem {
namespace {

// The nibbles of 16 bytes: all low ones, then all high ones.
void read_nibbles(const std::uint8_t* bytes, std::uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[16 + i] = bytes[i] >> 4;
  }
}

// The same with a fifth bit each, from four bytes.
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

// Eight scales and minima of 6 bits in 12 bytes. Minima are subtracted, so their factor's sign is
// flipped.
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

// NVFP4: four e4m3 scales, each for 16 nibbles. ggml reads a NaN scale as zero.
void read_nvfp4(const std::uint8_t* block, Sixteens& out) {
  for (int g = 0; g < 4; ++g) {
    const std::uint8_t scale = block[g] & kE4m3Nan;
    out.scales[g] = scale == kE4m3Nan ? std::uint8_t{0} : scale;
    for (int i = 0; i < 8; ++i) {
      const std::uint8_t byte = block[4 + 8 * g + i];
      out.codes[16 * g + i] = byte & 15;
      out.codes[16 * g + 8 + i] = byte >> 4;
    }
  }
}

// A factor, then the words of a grid's lines, unchanged.
template <int Words>
void read_lines(const std::uint8_t* block, Lines& out) {
  out.factor = half_bits(block);
  std::memcpy(out.words, block + 2, 4 * Words);
}

// IQ1_M has its factor within the words.
void read_iq1m(const std::uint8_t* block, Lines& out) {
  std::memcpy(out.words, block, 4 * kIq1M.words);
  out.factor = 0;
  for (int part = 0; part < 4; ++part) {
    const int at = kIq1M.factor.at(part);
    out.factor |= static_cast<std::uint16_t>((out.words[at / 32] >> at % 32 & 15) << 4 * part);
  }
}

}  // namespace

BlockReader block_reader(BlockKind kind) {
  switch (kind) {
    case BlockKind::kFields: return {};
    case BlockKind::kQ4_0:
    case BlockKind::kIq4Nl: return {18, read_q4_0};
    case BlockKind::kQ4_1: return {20, read_q4_1};
    case BlockKind::kQ5_0: return {22, read_q5_0};
    case BlockKind::kQ5_1: return {24, read_q5_1};
    case BlockKind::kQ8_0: return {34, read_q8_0};
    case BlockKind::kMxfp4: return {17, read_mxfp4};
    case BlockKind::kNvfp4: return {36, read_nvfp4};
    case BlockKind::kQ2K: return {84, read_q2k};
    case BlockKind::kQ3K: return {110, read_q3k};
    case BlockKind::kQ4K: return {144, read_q4k};
    case BlockKind::kQ5K: return {176, read_q5k};
    case BlockKind::kQ6K: return {210, read_q6k};
    case BlockKind::kIq4Xs: return {136, read_iq4xs};
    case BlockKind::kIq2Xxs:
      return {66, read_lines<kIq2Xxs.words>};
    case BlockKind::kIq2Xs:
      return {74, read_lines<kIq2Xs.words>};
    case BlockKind::kIq2S:
      return {82, read_lines<kIq2S.words>};
    case BlockKind::kIq3Xxs:
      return {98, read_lines<kIq3Xxs.words>};
    case BlockKind::kIq3S:
      return {110, read_lines<kIq3S.words>};
    case BlockKind::kIq1S:
      return {50, read_lines<kIq1S.words>};
    case BlockKind::kIq1M:
      return {56, read_iq1m};
  }
  return {};
}

}  // namespace tandem
