// A few tokens of bf16 in registers, with the bits of tiles: memory bounds them, and a tile gains nothing.
// The instruction adds up the products of even and of odd columns apart, each rounded once, over 32 columns;
// then both, and that onto the sum. Below the normal numbers all is zero, what is read as what is computed.
#pragma once

#include <cstring>

#include "few_tokens.hpp"
#include "panel.hpp"

namespace tandem {
namespace {

// From memory, four tokens are 1.1 times as fast as on tiles and six .97 (Sapphire Rapids, 2 threads).
constexpr std::int64_t kMostInTileOrder = 4;

// How tiles round, while it lives: to nearest even, no numbers below the normal ones. The compiler does not
// know of it, but reads no memory before what begins it, and writes all before what ends it.
class TileRounding {
 public:
  TileRounding() {
    constexpr std::uint32_t kFlushed = 0x9FC0;  // FTZ, DAZ, and no exception
    __asm__ volatile("stmxcsr %0" : "=m"(before_));
    __asm__ volatile("ldmxcsr %0" : : "m"(kFlushed) : "memory");
  }
  ~TileRounding() { __asm__ volatile("ldmxcsr %0" : : "m"(before_) : "memory"); }
  TileRounding(const TileRounding&) = delete;
  TileRounding& operator=(const TileRounding&) = delete;

 private:
  std::uint32_t before_;
};

// Activations of a few tokens as fp32, token by token, zeros behind them up to a whole strip.
class WideRows {
 public:
  WideRows(const Activations& x, std::int64_t num_tokens, std::int64_t cols)
      : stride_((cols + kStripCols - 1) / kStripCols * kStripCols) {
    thread_local Lines<float> memory;
    float* to = memory.of(num_tokens * stride_ / kBlockRows);
    values_ = to;
    for (std::int64_t t = 0; t < num_tokens; ++t)
      for (std::int64_t k = 0; k < stride_; k += 16) {
        const auto count = static_cast<int>(std::clamp<std::int64_t>(cols - k, 0, 16));
        const auto mask = static_cast<__mmask16>((1u << count) - 1);
        const __m256i halves = _mm256_maskz_loadu_epi16(mask, x.bf16 + t * x.stride + k);
        const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
        _mm512_store_si512(to + t * stride_ + k, wide);
      }
  }

  TANDEM_INLINE const float* of(std::int64_t token) const { return values_ + token * stride_; }

 private:
  const float* values_;
  std::int64_t stride_;
};

// 32 columns of a block, which lie as a tile wants them, times T tokens.
template <int T>
TANDEM_INLINE void add_strip(const std::uint8_t* data, std::int64_t ahead, WideRows x,
                             std::int64_t column, __m512 (&total)[T]) {
  __m512 even[T], odd[T];
  each<T>([&](auto t) TANDEM_INLINED { even[t] = odd[t] = _mm512_setzero_ps(); });
  each<kStripCols / 2>([&](auto pair) TANDEM_INLINED {
    asm volatile(
        "" ::
            : "memory");  // or the compiler asks for all lines at once, and they wait for each other
    prefetch(data + 64 * pair, ahead);
    const __m512i w = Bytes64::load(data + 64 * pair);
    const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(-0x10000)));
    each<T>([&](auto t) TANDEM_INLINED {
      const float* at = x.of(t) + column + 2 * pair;
      even[t] = _mm512_fmadd_ps(low, _mm512_set1_ps(at[0]), even[t]);
      odd[t] = _mm512_fmadd_ps(high, _mm512_set1_ps(at[1]), odd[t]);
    });
  });
  each<T>([&](auto t) TANDEM_INLINED {
    total[t] = _mm512_add_ps(total[t], _mm512_add_ps(even[t], odd[t]));
  });
}

// A block times T tokens; `sums` receives 16 for each.
template <int T>
void add_block(const PackedMatrix& m, std::int64_t block, WideRows x, float* sums) {
  const std::uint8_t* data = codes_at(m, block, 0);
  const std::int64_t whole = m.cols / kStripCols * kStripCols;
  __m512 total[T];
  each<T>([&](auto t) TANDEM_INLINED { total[t] = _mm512_setzero_ps(); });
  for (std::int64_t k = 0; k < whole; k += kStripCols, data += kStripBytes<Format::kBf16>)
    add_strip<T>(data, kAheadBytes, x, k, total);
  if (whole < m.cols) {
    alignas(64) std::uint8_t last[kStripBytes<Format::kBf16>] = {};
    std::memcpy(last, data, code_bytes(Format::kBf16, m.cols - whole));
    add_strip<T>(last, 0, x, whole, total);
  }
  each<T>([&](auto t) TANDEM_INLINED { _mm512_store_ps(sums + t * kBlockRows, total[t]); });
}

// As Kernels::matmul, of up to kMostInTileOrder tokens and of blocks that have rows.
inline void multiply_in_tile_order(const PackedMatrix& m, std::int64_t begin, std::int64_t end,
                                   const Activations& x, std::int64_t num_tokens,
                                   std::int64_t num_rows, float* out, std::int64_t stride) {
  thread_local Lines<float> memory;
  float* sums = memory.of((end - begin) * num_tokens);
  const std::int64_t block_sums = num_tokens * kBlockRows;
  const WideRows rows(x, num_tokens, m.cols);
  each<kMostInTileOrder>([&](auto i) TANDEM_INLINED {
    constexpr int T = decltype(i)::value + 1;
    if (num_tokens != T) return;
    const TileRounding rounding;  // once, as beginning it takes as long as 100 columns
    for (std::int64_t block = begin; block < end; ++block)
      add_block<T>(m, block, rows, sums + (block - begin) * block_sums);
  });
  for (std::int64_t block = begin; block < end; ++block) {
    const Output to = Output::of(m, block, num_rows, out, stride);
    for (std::int64_t t = 0; t < num_tokens; ++t)
      to.store(t, _mm512_load_ps(sums + (block - begin) * block_sums + t * kBlockRows));
  }
}

}  // namespace
}  // namespace tandem
