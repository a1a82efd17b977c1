// fp8 on the tiles of AMX: the weights of a group, which bf16 holds exactly, are decoded into the first-level
// cache as a tile wants them, and the sums of a group times its scale are added up. A few tokens have the same
// bits by registers (tile_order.hpp).
#pragma once

#include "bf16_tiles.hpp"

namespace tandem {
namespace {

constexpr std::int64_t kGroupCols = encoding(Format::kFp8).group;

// A group of two blocks.
struct DecodedGroup {
  alignas(64) std::uint8_t weights[kPairBlocks][code_bytes(Format::kBf16, kGroupCols)];
  __m512 scales[kPairBlocks];

  // Asks for the lines of a later one.
  void fill(const PackedMatrix& m, std::int64_t g, std::int64_t first, std::int64_t second) {
    const E4m3Decoder decoder;
    const std::int64_t blocks[kPairBlocks] = {first, second}, groups = m.cols / kGroupCols;
    for (int b = 0; b < kPairBlocks; ++b) {
      const std::uint8_t* data = codes_at(m, blocks[b], g * kGroupCols);
      std::uint8_t* to = weights[b];
      for (std::int64_t k = 0; k < kGroupCols; k += 4, data += 64, to += 128) {
        __m512i two[2];
        prefetch(data, kAheadBytes);
        decoder.decode(data, two);
        _mm512_store_si512(to, two[0]);
        _mm512_store_si512(to + 64, two[1]);
      }
      scales[b] = load_scales<Format::kFp8>(m, blocks[b], blocks[b] * groups + g);
    }
    see_memory();
  }

  // Up to 32 tokens from column `k` on; `totals` are those of a token side by side.
  void multiply(FourTiles& tiles, const std::uint16_t* x, std::int64_t stride,
                std::int64_t num_tokens, float* totals) const {
    alignas(64) float sums[kPairTokens * kSumStride];
    tiles.use_tokens(num_tokens);
    tiles.clear();
    each<kGroupCols / kStripCols>([&](auto strip) TANDEM_INLINED {
      tiles.multiply(x + strip * kStripCols, stride, weights[0] + strip * kTileBytes,
                     weights[1] + strip * kTileBytes);
    });
    tiles.store(sums);
    for (std::int64_t t = 0; t < num_tokens; ++t)
      each<kPairBlocks>([&](auto b) TANDEM_INLINED {
        float* total = totals + t * kSumStride + b * kBlockRows;
        const __m512 sum = _mm512_load_ps(sums + t * kSumStride + b * kBlockRows);
        _mm512_store_ps(total, _mm512_fmadd_ps(sum, scales[b], _mm512_load_ps(total)));
      });
  }
};

// As Kernels::matmul, of blocks that have rows.
inline void multiply_fp8(const PackedMatrix& m, std::int64_t begin, std::int64_t end,
                         const Activations& x, std::int64_t num_tokens, std::int64_t num_rows,
                         float* out, std::int64_t stride) {
  thread_local Lines<float> memory;
  const EvenParts parts = EvenParts::of(num_tokens);
  const std::int64_t part_floats = parts.rows * kSumStride;
  float* totals = memory.of(parts.count * parts.rows * kPairBlocks);
  DecodedGroup group;
  const TileRounding rounding;  // of scales and of the bias
  FourTiles tiles;
  for (std::int64_t block = begin; block < end; block += kPairBlocks) {
    const std::int64_t last = std::min(block + kPairBlocks, end) - 1;
    std::fill_n(totals, parts.count * part_floats, 0.0f);
    for (std::int64_t k = 0; k < m.cols; k += kGroupCols) {
      group.fill(m, k / kGroupCols, block, last);
      for (std::int64_t p = 0; p < parts.count; ++p)
        group.multiply(tiles, x.bf16 + parts.first(p) * x.stride + k, x.stride, parts.rows,
                       totals + p * part_floats);
    }
    store_pair(m, block, last, parts, num_rows, totals, out, stride);
  }
}

}  // namespace
}  // namespace tandem
