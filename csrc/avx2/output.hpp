// Shared by the 256-bit kernels: where sums are stored, and how tokens are split into tiles.
//
// Everything is in an anonymous namespace. Each file that includes this is compiled for another
// instruction set, and the linker would keep one copy of a shared function for all of them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../kernels.hpp"

namespace tandem {
namespace {

constexpr int kStreamedTile = 4;  // tokens multiplied by each weight while it is in a register
constexpr int kHalves = 2;  // registers that hold one value for each of the 16 rows

// Sums of T tokens and the 16 rows of a block.
template <int T>
using Totals = __m256[T][kHalves];

// The output of a block. If its columns are split into parts, the first part starts at zero, and
// the last one adds the bias.
struct Output {
  float* at;  // the block's first row for the tile's first token
  std::int64_t stride;
  std::int64_t num_rows;  // 16, or fewer in the last block
  const float* bias;  // the block's bias, or null
  bool is_first, is_last;

  template <int T>
  void load(Totals<T>& total) const {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      for (int h = 0; h < kHalves; ++h) total[t][h] = _mm256_setzero_ps();
      if (!is_first) load_row(at + t * stride, total[t]);
    }
  }

  template <int T>
  void store(const Totals<T>& total) const {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      __m256 row[kHalves];
      for (int h = 0; h < kHalves; ++h)
        row[h] = is_last && bias ? _mm256_add_ps(total[t][h], _mm256_loadu_ps(bias + 8 * h))
                                 : total[t][h];
      store_row(at + t * stride, row);
    }
  }

  Output token(std::int64_t t) const {
    Output moved = *this;
    moved.at += t * stride;
    return moved;
  }

 private:
  void load_row(const float* row, __m256 (&values)[kHalves]) const {
    alignas(32) float lanes[16] = {};
    if (num_rows < 16) std::memcpy(lanes, row, num_rows * sizeof(float));
    const float* from = num_rows < 16 ? lanes : row;
    for (int h = 0; h < kHalves; ++h) values[h] = _mm256_loadu_ps(from + 8 * h);
  }

  // Stores through memory, because a masked store takes dozens of cycles on older AMD processors.
  void store_row(float* row, const __m256 (&values)[kHalves]) const {
    alignas(32) float lanes[16];
    float* to = num_rows < 16 ? lanes : row;
    for (int h = 0; h < kHalves; ++h) _mm256_storeu_ps(to + 8 * h, values[h]);
    if (num_rows < 16) std::memcpy(row, lanes, num_rows * sizeof(float));
  }
};

// The operands of one product, and where its blocks' results go.
struct Product {
  const PackedMatrix& m;
  const Activations& x;
  std::int64_t num_rows;
  float* out;
  std::int64_t stride;

  Output block(std::int64_t b, bool is_first, bool is_last) const {
    const std::int64_t left = num_rows - b * kBlockRows;
    return {out + b * kBlockRows, stride, left < kBlockRows ? left : kBlockRows,
            m.bias ? m.bias + b * kBlockRows : nullptr, is_first, is_last};
  }
};

// Calls run<count>() for a count of 1..Most.
template <int Most, class Run>
void with_exactly(std::int64_t count, const Run& run) {
  if (count == Most) return run.template operator()<Most>();
  if constexpr (Most > 1) with_exactly<Most - 1>(count, run);
}

// Calls run<T>(t) for tiles of tokens 0..num_tokens-1; the last tile has those that are left.
template <int Most, class Run>
void in_tiles(std::int64_t num_tokens, const Run& run) {
  for (std::int64_t t = 0; t < num_tokens; t += Most) {
    const std::int64_t left = num_tokens - t;
    with_exactly<Most>(left < Most ? left : Most, [&]<int T>() { run.template operator()<T>(t); });
  }
}

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Limits `end` to blocks that contain at least one row.
inline std::int64_t last_block(std::int64_t end, std::int64_t num_rows) {
  return smaller(end, (num_rows + kBlockRows - 1) / kBlockRows);
}

}  // namespace
}  // namespace tandem
