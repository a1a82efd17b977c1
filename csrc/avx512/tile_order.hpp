// A few tokens of bf16 or fp8 in registers, with the bits of tiles: memory bounds them, and a tile gains nothing.
// The instruction adds up the products of even and of odd columns apart, each rounded once, over 32 columns;
// then both, and that onto the sum. Below the normal numbers all is zero, what is read as what is computed.
#pragma once

#include <cstring>

#include "few_tokens.hpp"
#include "panel.hpp"
#include "tile_rounding.hpp"

namespace tandem {
namespace {

// With one token more tiles are faster: from memory, two cores of a Sapphire Rapids, registers over tiles are
// 1.04 with five of bf16 and .96 with six, 1.17 with one of fp8, 1.08 with two and .93 with three.
template <Format F>
constexpr std::int64_t kMostInTileOrder = F == Format::kFp8 ? 2 : 5;

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

// Where 32 columns of a block are read, and how far ahead of that lines are asked for: one by one, or the
// compiler asks for all at once, and they wait for each other.
struct Bf16Strip {
  const std::uint8_t* data;
  std::int64_t ahead;

  template <int Pair>
  TANDEM_INLINE __m512i columns() {
    asm volatile("" ::: "memory");
    prefetch(data + 64 * Pair, ahead);
    return Bytes64::load(data + 64 * Pair);
  }
};

struct Fp8Strip {
  const std::uint8_t* data;
  E4m3Decoder decoder;
  __m512i decoded[2] = {};

  template <int Pair>
  TANDEM_INLINE __m512i columns() {
    if constexpr (Pair % 2 == 0) {
      asm volatile("" ::: "memory");
      prefetch(data + 32 * Pair, kAheadBytes);
      decoder.decode(data + 32 * Pair, decoded);
    }
    return decoded[Pair % 2];
  }
};

// 32 columns of a block, two of 16 rows after the other, times T tokens.
template <int T, typename Strip>
TANDEM_INLINE void add_strip(Strip strip, WideRows x, std::int64_t column, __m512 (&total)[T]) {
  __m512 even[T], odd[T];
  each<T>([&](auto t) TANDEM_INLINED { even[t] = odd[t] = _mm512_setzero_ps(); });
  each<kStripCols / 2>([&](auto pair) TANDEM_INLINED {
    const __m512i w = strip.template columns<decltype(pair)::value>();
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

template <int T>
TANDEM_INLINE void add_bf16(const PackedMatrix& m, std::int64_t block, WideRows x,
                            __m512 (&total)[T]) {
  const std::uint8_t* data = codes_at(m, block, 0);
  const std::int64_t whole = m.cols / kStripCols * kStripCols;
  for (std::int64_t k = 0; k < whole; k += kStripCols, data += kStripBytes<Format::kBf16>)
    add_strip<T>(Bf16Strip{data, kAheadBytes}, x, k, total);
  if (whole < m.cols) {
    alignas(64) std::uint8_t last[kStripBytes<Format::kBf16>] = {};
    std::memcpy(last, data, code_bytes(Format::kBf16, m.cols - whole));
    add_strip<T>(Bf16Strip{last, 0}, x, whole, total);
  }
}

template <int T>
TANDEM_INLINE void add_fp8(const PackedMatrix& m, std::int64_t block, WideRows x,
                           __m512 (&total)[T]) {
  const E4m3Decoder decoder;
  const std::uint8_t* data = codes_at(m, block, 0);
  const std::int64_t groups = m.cols / m.group;
  for (std::int64_t g = 0; g < groups; ++g) {
    __m512 sum[T];
    each<T>([&](auto t) TANDEM_INLINED { sum[t] = _mm512_setzero_ps(); });
    for (std::int64_t k = g * m.group; k < (g + 1) * m.group; k += kStripCols) {
      add_strip<T>(Fp8Strip{data, decoder}, x, k, sum);
      data += kStripBytes<Format::kFp8>;
    }
    const __m512 scale = load_scales<Format::kFp8>(m, block, block * groups + g);
    each<T>([&](auto t) TANDEM_INLINED { total[t] = _mm512_fmadd_ps(sum[t], scale, total[t]); });
  }
}

// As Kernels::matmul, up to kMostInTileOrder tokens and blocks that have rows.
template <Format F>
void multiply_in_tile_order(const PackedMatrix& m, std::int64_t begin, std::int64_t end,
                            const Activations& x, std::int64_t num_tokens, std::int64_t num_rows,
                            float* out, std::int64_t stride) {
  const WideRows rows(x, num_tokens, m.cols);
  const TileRounding rounding;
  each<kMostInTileOrder<F>>([&](auto i) TANDEM_INLINED {
    constexpr int T = decltype(i)::value + 1;
    if (num_tokens != T) return;
    for (std::int64_t block = begin; block < end; ++block) {
      const Output to = Output::of(m, block, num_rows, out, stride);
      __m512 total[T];
      each<T>([&](auto t) TANDEM_INLINED { total[t] = _mm512_setzero_ps(); });
      if constexpr (F == Format::kFp8)
        add_fp8<T>(m, block, rows, total);
      else
        add_bf16<T>(m, block, rows, total);
      each<T>([&](auto t) TANDEM_INLINED { to.store(t, total[t]); });
    }
  });
}

}  // namespace
}  // namespace tandem
