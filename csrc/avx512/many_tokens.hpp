// For many tokens: panel by panel, tile by tile. Bound by arithmetic.
#pragma once

#include "tiles.hpp"

namespace tandem {
namespace {

// many_tokens' way to multiply a panel in registers, for more than `kFewTokens` tokens. Tiles share
// tokens evenly, so none is much smaller than the largest.
template <Format F, int Group>
struct InRegisters {
  static constexpr int kBlocks = Shape<F, Group>::kBlocks;

  static std::int64_t count(std::int64_t num_tokens) { return Shape<F, Group>::count(num_tokens); }

  static void multiply(const Panel& panel, Columns columns, const Activations& x,
                       std::int64_t num_tokens, const Results& results, Ahead ahead) {
    constexpr int kMost = Shape<F, Group>::kTokens;
    const std::int64_t num_tiles = count(num_tokens);
    for (std::int64_t i = 0; i < num_tiles; ++i) {
      const std::int64_t t = i * num_tokens / num_tiles;
      const std::int64_t count = (i + 1) * num_tokens / num_tiles - t;
      each<3>([&](auto fewer) TANDEM_INLINED {
        if (count == kMost - fewer)
          tile<F, Group, kMost - decltype(fewer)::value>(panel, columns, x, t, results, ahead);
      });
    }
  }
};

// Rows that a tile may read behind the last token.
constexpr std::int64_t kSpareTokens = 15;

// Where results go. Blocks beyond the end of the matrix have no results.
template <Format F>
Results results_of(const PackedMatrix& m, Blocks blocks, std::int64_t num_tokens,
                   std::int64_t num_rows, float* out, std::int64_t stride) {
  thread_local Lines<float> memory;
  const bool is_kept = m.cols > kPanelColumns<F>;
  float* kept =
      is_kept ? memory.of((num_tokens + kSpareTokens) * kMostBlocks * kParts<F>) : nullptr;
  Results results{kept, kParts<F>, true, true, blocks.count, {}};
  for (int b = 0; b < blocks.count; ++b)
    results.to[b] = Output::of(m, blocks.first + b, num_rows, out, stride);
  return results;
}

// In formats with groups, these have as many columns as `Way` expects.
template <Format F, typename Way>
void multiply_panels(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
                 std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  constexpr int B = Way::kBlocks;
  thread_local Panel panel;
  Way way;
  const auto columns_from = [&](std::int64_t k) {
    return Columns{k, std::min(k + kPanelColumns<F>, m.cols)};
  };
  const auto blocks_from = [&](std::int64_t first) {
    return Blocks{first, static_cast<int>(std::clamp<std::int64_t>(end - first, 0, B))};
  };
  const std::int64_t num_tiles = way.count(num_tokens);
  for (std::int64_t block = begin; block < end; block += B) {
    Results results = results_of<F>(m, blocks_from(block), num_tokens, num_rows, out, stride);
    for (std::int64_t k = 0; k < m.cols; k += kPanelColumns<F>) {
      const Columns columns = columns_from(k);
      results.is_first = k == 0;
      results.is_last = columns.end == m.cols;
      const std::int64_t next = results.is_last ? block + B : block;
      const Ahead ahead =
          Ahead::of<F>(m, blocks_from(next), columns_from(results.is_last ? 0 : columns.end),
                       num_tiles * num_pieces(columns.count()));
      panel.fill<F, B>(m, blocks_from(block), columns);
      way.multiply(panel, columns, x, num_tokens, results, ahead);
    }
  }
}

template <Format F, int Group>
void many_tokens(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
                 std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  multiply_panels<F, InRegisters<F, Group>>(m, begin, end, x, num_tokens, num_rows, out, stride);
}

}  // namespace
}  // namespace tandem
