// bf16 on the tiles of AMX: an instruction multiplies 16 tokens with 32 columns of a block's 16 rows, which
// lie in memory as a tile wants them. Any number of tokens can be multiplied so: sums go through the columns in
// one order, whether they stay in tiles or wait in memory for the next panel, so that a token's bits do not
// depend on the others. A few tokens have the same bits by registers (tile_order.hpp).
#pragma once

#include <cstring>

#include "../amx.hpp"
#include "few_tokens.hpp"
#include "panel.hpp"
#include "tile_rounding.hpp"

namespace tandem {
namespace {

constexpr std::int64_t kTileBytes = 1024;  // 16 rows of 64
constexpr std::int64_t kPairTokens = 2 * kTileTokens;
constexpr int kPairBlocks = 2;
// Two blocks' columns stay in the first-level cache beside the activations that pass by.
constexpr std::int64_t kPairColumns = 256;
constexpr std::int64_t kSumStride = kPairBlocks * kBlockRows;  // floats of a token's sums

// Two tiles of tokens times two of rows. Tiles by number, which the instructions want as literals: 0 and 1
// sums of the first tokens, 2 and 3 of the second, 4 and 5 activations, 6 and 7 weights.
class FourTiles {
 public:
  FourTiles() = default;
  ~FourTiles() { _tile_release(); }
  FourTiles(const FourTiles&) = delete;
  FourTiles& operator=(const FourTiles&) = delete;

  // 1 to 32 tokens.
  void use_tokens(std::int64_t tokens) {
    if (tokens == tokens_) return;
    tokens_ = tokens;
    const auto first = static_cast<std::uint8_t>(std::min(tokens, kTileTokens));
    const auto second = static_cast<std::uint8_t>(std::max<std::int64_t>(tokens - kTileTokens, 1));
    const std::uint8_t rows[8] = {first, first, second, second, first, second, 16, 16};
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = rows[tile];
    }
    see_memory();
    _tile_loadconfig(&config);
  }

  void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  void load(const float* sums) {
    _tile_loadd(0, sums, 4 * kSumStride);
    _tile_loadd(1, sums + kBlockRows, 4 * kSumStride);
    if (tokens_ <= kTileTokens) return;
    _tile_loadd(2, sums + kTileTokens * kSumStride, 4 * kSumStride);
    _tile_loadd(3, sums + kTileTokens * kSumStride + kBlockRows, 4 * kSumStride);
  }

  void store(float* sums) {
    _tile_stored(0, sums, 4 * kSumStride);
    _tile_stored(1, sums + kBlockRows, 4 * kSumStride);
    if (tokens_ > kTileTokens) {
      _tile_stored(2, sums + kTileTokens * kSumStride, 4 * kSumStride);
      _tile_stored(3, sums + kTileTokens * kSumStride + kBlockRows, 4 * kSumStride);
    }
    see_memory();
  }

  // 32 columns; `stride` is that of tokens, in values.
  TANDEM_INLINE void multiply(const std::uint16_t* x, std::int64_t stride,
                              const std::uint8_t* first, const std::uint8_t* second) {
    _tile_loadd(6, first, 64);
    _tile_loadd(7, second, 64);
    _tile_loadd(4, x, 2 * stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (tokens_ <= kTileTokens) return;
    _tile_loadd(5, x + kTileTokens * stride, 2 * stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

 private:
  std::int64_t tokens_ = 0;
};

// Up to 32 tokens times two blocks, from a panel's first column on.
struct PairPanel {
  const std::uint16_t* x;
  std::int64_t stride, tokens;
  const std::uint8_t* first;
  const std::uint8_t* second;
  float* sums;

  // The last columns, fewer than a tile's, with zeros behind them.
  void multiply_last(FourTiles& tiles, std::int64_t at, std::int64_t columns) const {
    alignas(64) std::uint16_t rows[kPairTokens * kStripCols] = {};
    alignas(64) std::uint8_t weights[kPairBlocks][kTileBytes] = {};
    for (std::int64_t t = 0; t < tokens; ++t)
      std::memcpy(rows + t * kStripCols, x + t * stride + at, 2 * columns);
    const std::int64_t begin = code_bytes(Format::kBf16, at),
                       bytes = code_bytes(Format::kBf16, columns);
    std::memcpy(weights[0], first + begin, bytes);
    std::memcpy(weights[1], second + begin, bytes);
    see_memory();
    tiles.multiply(rows, kStripCols, weights[0], weights[1]);
  }

  // Adds the products of so many columns to the sums, and asks for the weights `ahead` bytes behind.
  template <bool IsAhead>
  void multiply(FourTiles& tiles, std::int64_t columns, bool is_first, std::int64_t ahead) const {
    tiles.use_tokens(tokens);
    if (is_first)
      tiles.clear();
    else
      tiles.load(sums);
    const std::int64_t whole = columns / kStripCols * kStripCols;
    const std::uint8_t* to_first = first;
    const std::uint8_t* to_second = second;
    for (std::int64_t k = 0; k < whole; k += kStripCols) {
      if constexpr (IsAhead)
        each<kTileBytes / 64>([&](auto line) TANDEM_INLINED {
          _mm_prefetch(reinterpret_cast<const char*>(to_first + 64 * line + ahead), _MM_HINT_T1);
          _mm_prefetch(reinterpret_cast<const char*>(to_second + 64 * line + ahead), _MM_HINT_T1);
        });
      tiles.multiply(x + k, stride, to_first, to_second);
      to_first += kTileBytes;
      to_second += kTileBytes;
    }
    if (whole < columns) multiply_last(tiles, whole, columns - whole);
    tiles.store(sums);
  }
};

// Tokens in parts of the same number of rows, at most 32, so that the last part begins in the one before.
struct EvenParts {
  std::int64_t num_tokens, rows, count;

  static EvenParts of(std::int64_t num_tokens) {
    const std::int64_t rows = std::max<std::int64_t>(1, even_rows(num_tokens, kPairTokens));
    return {num_tokens, rows, (num_tokens + rows - 1) / rows};
  }

  std::int64_t first(std::int64_t part) const { return std::min(part * rows, num_tokens - rows); }
};

// Two blocks times all tokens; `sums` receives those of a part's row side by side. Up to 32 tokens take all
// columns at once; of more the first ones bring the panel into the cache.
inline void multiply_pair(FourTiles& tiles, const PackedMatrix& m, std::int64_t first,
                          std::int64_t second, const Activations& x, const EvenParts& parts,
                          float* sums) {
  const std::int64_t most = parts.count > 1 ? kPairColumns : m.cols;
  for (std::int64_t k = 0; k < m.cols; k += most) {
    const std::int64_t columns = std::min(most, m.cols - k);
    for (std::int64_t p = 0; p < parts.count; ++p) {
      const PairPanel panel{x.bf16 + parts.first(p) * x.stride + k,
                            x.stride,
                            parts.rows,
                            codes_at(m, first, k),
                            codes_at(m, second, k),
                            sums + p * parts.rows * kSumStride};
      if (p == 0)
        panel.multiply<true>(tiles, columns, k == 0, kAheadBytes);
      else
        panel.multiply<false>(tiles, columns, k == 0, 0);
    }
  }
}

// What was added up, those of a part's row side by side, to where it belongs.
inline void store_pair(const PackedMatrix& m, std::int64_t block, std::int64_t last,
                       const EvenParts& parts, std::int64_t num_rows, const float* sums, float* out,
                       std::int64_t stride) {
  for (std::int64_t b = block; b <= last; ++b) {
    const Output to = Output::of(m, b, num_rows, out, stride);
    const float* own = sums + (b - block) * kBlockRows;
    for (std::int64_t p = 0; p < parts.count; ++p)
      for (std::int64_t i = 0; i < parts.rows; ++i, own += kSumStride)
        to.store(parts.first(p) + i, _mm512_load_ps(own));
  }
}

// As Kernels::matmul, of blocks that have rows.
inline void multiply_bf16(const PackedMatrix& m, std::int64_t begin, std::int64_t end,
                          const Activations& x, std::int64_t num_tokens, std::int64_t num_rows,
                          float* out, std::int64_t stride) {
  thread_local Lines<float> sum_memory;
  const EvenParts parts = EvenParts::of(num_tokens);
  float* sums = sum_memory.of(parts.count * parts.rows * kPairBlocks);
  see_memory();
  const TileRounding rounding;  // of the bias
  FourTiles tiles;
  for (std::int64_t block = begin; block < end; block += kPairBlocks) {
    const std::int64_t last = std::min(block + kPairBlocks, end) - 1;
    multiply_pair(tiles, m, block, last, x, parts, sums);
    store_pair(m, block, last, parts, num_rows, sums, out, stride);
  }
}

// What tiles can do, for comparison: as Kernels::multiply_bf16.
inline std::int64_t multiply_bf16_tiles(std::int64_t count) {
  alignas(64) const std::uint8_t zeros[kTileBytes] = {};
  FourTiles tiles;
  tiles.use_tokens(kPairTokens);
  tiles.clear();
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  for (std::int64_t i = 0; i < count; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return count * kPairTokens * kPairBlocks * kBlockRows * kStripCols * 2;
}

}  // namespace
}  // namespace tandem
