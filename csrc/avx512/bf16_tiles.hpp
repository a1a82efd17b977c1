// bf16 on the tiles of AMX: an instruction multiplies 16 tokens with 32 columns of a block's 16 rows.
// Sums stay in tiles over a panel's columns and go on in the next one, so that a token's bits do not
// depend on the others; they are not those of registers.
#pragma once

#include <cstring>

#include "../amx.hpp"
#include "bf16_lines.hpp"

namespace tandem {
namespace {

constexpr std::int64_t kPairTokens = 2 * kTileTokens;
constexpr int kPairBlocks = 2;
// A panel's lines of two blocks stay in the first-level cache beside the activations that pass by.
constexpr std::int64_t kLinePanelColumns = 256;
constexpr std::int64_t kPanelBytes = kLinePanelColumns / kLineColumns * kLineBytes;  // of a block
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

  // `stride` is that of tokens, in values; of weights 16 lines of each block.
  TANDEM_INLINE void multiply(const std::uint16_t* x, std::int64_t stride,
                              const std::uint8_t* first, const std::uint8_t* second) {
    see_memory();
    _tile_loadd(6, first, kLineBytes);
    _tile_loadd(7, second, kLineBytes);
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

// A panel's weights: bf16's where they lie.
struct PairLines {
  const std::uint8_t* first;
  const std::uint8_t* second;
};

// Up to 32 tokens, from a panel's first column on.
struct PairRows {
  const std::uint16_t* x;
  std::int64_t stride, tokens;
  float* sums;
};

// The last columns of bf16's matrices, fewer than a tile's, with zeros behind them.
inline void multiply_last(FourTiles& tiles, const PairRows& rows, PairLines lines, std::int64_t at,
                          std::int64_t columns) {
  alignas(64) std::uint16_t x[kPairTokens * kStripCols] = {};
  alignas(64) std::uint8_t last[kPairBlocks][kTileBytes] = {};
  for (std::int64_t t = 0; t < rows.tokens; ++t)
    std::memcpy(x + t * kStripCols, rows.x + t * rows.stride + at, 2 * columns);
  const std::int64_t begin = at / kLineColumns * kLineBytes,
                     bytes = columns / kLineColumns * kLineBytes;
  std::memcpy(last[0], lines.first + begin, bytes);
  std::memcpy(last[1], lines.second + begin, bytes);
  tiles.multiply(x, kStripCols, last[0], last[1]);
}

// Adds a panel's products to the tokens' sums. `decode(column)` is called for each strip, the one ahead
// of that which is multiplied: registers and tiles work side by side.
template <typename Decode>
void multiply_panel(FourTiles& tiles, const PairRows& rows, PairLines lines, std::int64_t columns,
                    bool is_first, const Decode& decode) {
  tiles.use_tokens(rows.tokens);
  if (is_first)
    tiles.clear();
  else
    tiles.load(rows.sums);
  decode(0);
  const std::int64_t whole = columns / kStripCols * kStripCols;
  for (std::int64_t k = 0; k < whole; k += kStripCols) {
    if (k + kStripCols < whole) decode(k + kStripCols);
    const std::int64_t at = k / kLineColumns * kLineBytes;
    tiles.multiply(rows.x + k, rows.stride, lines.first + at, lines.second + at);
  }
  if (whole < columns) multiply_last(tiles, rows, lines, whole, columns - whole);
  tiles.store(rows.sums);
}

// Two blocks times all tokens; `sums` receives those of a token side by side.
template <Format F>
void multiply_pair(FourTiles& tiles, const PackedMatrix& m, std::int64_t first, std::int64_t second,
                   const Activations& x, std::int64_t num_tokens, float* sums) {
  alignas(64) std::uint8_t memory[kPairBlocks][kPanelBytes];
  for (std::int64_t k = 0; k < m.cols; k += kLinePanelColumns) {
    const std::int64_t columns = std::min(kLinePanelColumns, m.cols - k);
    for (std::int64_t t = 0; t < num_tokens; t += kPairTokens) {
      const PairRows rows{x.bf16 + t * x.stride + k, x.stride,
                          std::min(kPairTokens, num_tokens - t), sums + t * kSumStride};
      const auto multiply = [&](PairLines lines, const auto& decode) {
        multiply_panel(tiles, rows, lines, columns, k == 0, decode);
      };
      if constexpr (F == Format::kBf16) {
        multiply({codes_at(m, first, k), codes_at(m, second, k)}, [](std::int64_t) {});
      } else if (t > 0) {
        multiply({memory[0], memory[1]}, [](std::int64_t) {});
      } else {
        BlockStrips<F> own(m, first), other(m, second);
        multiply({memory[0], memory[1]}, [&](std::int64_t column) TANDEM_INLINED {
          const std::int64_t at = column / kLineColumns * kLineBytes;
          own.decode(k + column, memory[0] + at);
          other.decode(k + column, memory[1] + at);
        });
      }
    }
  }
}

// As Kernels::matmul, with activations in bf16.
template <Format F>
void multiply_lines(const PackedMatrix& m, std::int64_t begin, std::int64_t end,
                    const Activations& x, std::int64_t num_tokens, std::int64_t num_rows,
                    float* out, std::int64_t stride) {
  thread_local Lines<float> sum_memory;
  float* sums = sum_memory.of(num_tokens * kPairBlocks);
  FourTiles tiles;
  end = std::min(end, (num_rows + kBlockRows - 1) / kBlockRows);
  for (std::int64_t block = begin; block < end; block += kPairBlocks) {
    const std::int64_t last = std::min(block + kPairBlocks, end) - 1;
    multiply_pair<F>(tiles, m, block, last, x, num_tokens, sums);
    for (std::int64_t b = block; b <= last; ++b) {
      const Output to = Output::of(m, b, num_rows, out, stride);
      const float* own = sums + (b - block) * kBlockRows;
      for (std::int64_t t = 0; t < num_tokens; ++t)
        to.store(t, _mm512_load_ps(own + t * kSumStride));
    }
  }
}

// What tiles can do, for comparison: as Kernels::multiply_bf16.
inline std::int64_t multiply_bf16_tiles(std::int64_t count) {
  alignas(64) const std::uint16_t zeros[kPairTokens * kStripCols] = {};
  const auto* lines = reinterpret_cast<const std::uint8_t*>(zeros);
  FourTiles tiles;
  tiles.use_tokens(kPairTokens);
  tiles.clear();
  for (std::int64_t i = 0; i < count; ++i) tiles.multiply(zeros, kStripCols, lines, lines);
  return count * kPairTokens * kPairBlocks * kBlockRows * kStripCols * 2;
}

}  // namespace
}  // namespace tandem
