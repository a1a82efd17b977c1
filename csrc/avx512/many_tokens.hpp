// Many tokens: panel by panel, tile by tile. Bound by arithmetic.
#pragma once

#include "tiles.hpp"

namespace tandem {
namespace {

template <Format F>
void multiply_panel(const Panel& panel, Columns columns, const Activations& x,
                    std::int64_t num_tokens, const Results& results, Ahead ahead) {
  for (std::int64_t t = 0; t < num_tokens; t += kTileTokens) {
    for (int b = 0; b < kPanelBlocks; b += kTileBlocks<F>) {
      switch (num_tokens - t) {
        case 1: tile<F, 1>(panel, b, columns, x, t, results, ahead); break;
        case 2: tile<F, 2>(panel, b, columns, x, t, results, ahead); break;
        case 3: tile<F, 3>(panel, b, columns, x, t, results, ahead); break;
        default: tile<F, kTileTokens>(panel, b, columns, x, t, results, ahead);
      }
    }
  }
}

// Where results go; blocks that the matrix has not go nowhere.
template <Format F>
Results results_of(const PackedMatrix& m, Blocks blocks, std::int64_t num_tokens,
                   std::int64_t num_rows, float* out, std::int64_t stride) {
  thread_local Lines<float> memory;
  const bool is_kept = m.cols > kPanelColumns<F>;
  float* kept = is_kept ? memory.of(num_tokens * kPanelBlocks * kParts<F>) : nullptr;
  Results results{kept, kParts<F>, true, true, blocks.count, {}};
  for (int b = 0; b < blocks.count; ++b)
    results.to[b] = Output::of(m, blocks.first + b, num_rows, out, stride);
  return results;
}

// Groups of `kTileGroup`, or none.
template <Format F>
void many_tokens(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
                 std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  thread_local Panel panel;
  const auto columns_from = [&](std::int64_t k) {
    return Columns{k, std::min(k + kPanelColumns<F>, m.cols)};
  };
  const auto blocks_from = [&](std::int64_t first) {
    return Blocks{first,
                  static_cast<int>(std::clamp<std::int64_t>(end - first, 0, kPanelBlocks))};
  };
  const std::int64_t num_tiles =
      (num_tokens + kTileTokens - 1) / kTileTokens * (kPanelBlocks / kTileBlocks<F>);
  for (std::int64_t block = begin; block < end; block += kPanelBlocks) {
    Results results = results_of<F>(m, blocks_from(block), num_tokens, num_rows, out, stride);
    for (std::int64_t k = 0; k < m.cols; k += kPanelColumns<F>) {
      const Columns columns = columns_from(k);
      results.is_first = k == 0;
      results.is_last = columns.end == m.cols;
      const std::int64_t next = results.is_last ? block + kPanelBlocks : block;
      const Ahead ahead =
          Ahead::of<F>(m, blocks_from(next), columns_from(results.is_last ? 0 : columns.end),
                       num_tiles * num_pieces(columns.count()));
      panel.fill<F>(m, blocks_from(block), columns);
      multiply_panel<F>(panel, columns, x, num_tokens, results, ahead);
    }
  }
}

}  // namespace
}  // namespace tandem
