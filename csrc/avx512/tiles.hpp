// Tiles of a few tokens and row blocks, whose sums stay in registers over all columns of a panel.
#pragma once

#include "panel.hpp"

namespace tandem {
namespace {

// Sums per result until all columns are added; see `few_tokens`.
template <Format F>
constexpr int kParts = F == Format::kBf16 || F == Format::kFp16 ? 2 : 1;

// The shape of a tile, so that results fit the registers. If groups of integers are short, their
// totals are in registers, too. With two parts, a result has two sums.
template <Format F, int Group>
struct Shape {
  static constexpr bool kIsShort = is_integer(F) && Group < 128;
  static constexpr int kTokens = kIsShort ? 6 : 4;
  static constexpr int kBlocks = is_integer(F) && !kIsShort ? 4 : 2;

  // Number of tiles for this many tokens.
  static constexpr std::int64_t count(std::int64_t num_tokens) {
    return (num_tokens + kTokens - 1) / kTokens;
  }
};

// A tile prefetches a piece of the next panel before each of these steps.
constexpr std::int64_t num_pieces(std::int64_t columns) {
  return (columns + kPieceColumns - 1) / kPieceColumns;
}

// Calls function(token, block) for every pair of a tile.
template <int T, int B, typename Function>
TANDEM_INLINE void each_pair(const Function& function) {
  each<T>([&](auto t) TANDEM_INLINED {
    each<B>([&](auto b) TANDEM_INLINED { function(t, b); });
  });
}

// Results of a tile's row blocks. They are kept in memory between panels and written after the last
// one.
struct Results {
  float* kept;  // [token][block][part], one register each
  int parts;
  bool is_first, is_last;
  int num_blocks;
  Output to[kMostBlocks];

  float* at(std::int64_t token, int block, int part) const {
    return kept + ((token * kMostBlocks + block) * parts + part) * kBlockRows;
  }

  template <int T, int B>
  TANDEM_INLINE void load(std::int64_t token, int part, __m512 (&sums)[T][B]) const {
    each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED { sums[t][b] = _mm512_setzero_ps(); });
    if (is_first) return;
    each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
      sums[t][b] = _mm512_load_ps(at(token + t, b, part));
    });
  }

  TANDEM_INLINE void store(std::int64_t token, int block, __m512 sum) const {
    if (!is_last)
      _mm512_store_ps(at(token, block, 0), sum);
    else if (block < num_blocks)
      to[block].store(token, sum);
  }

  TANDEM_INLINE void store(std::int64_t token, int block, __m512 even, __m512 odd) const {
    if (!is_last) {
      _mm512_store_ps(at(token, block, 0), even);
      _mm512_store_ps(at(token, block, 1), odd);
    } else if (block < num_blocks) {
      to[block].store(token, _mm512_add_ps(even, odd));
    }
  }
};

template <int B>
struct Codes {
  const std::uint8_t* block[B];

  Codes(const Panel& panel, std::int64_t step) {
    each<B>([&](auto b) TANDEM_INLINED { block[b] = panel.codes[b] + step * 64; });
  }

  TANDEM_INLINE __m512i load(int b, std::int64_t step) const {
    return _mm512_loadu_si512(block[b] + step * 64);
  }
};

template <int Group, int T, int B>
TANDEM_INLINE void multiply_group(const Codes<B>& codes, const std::int8_t* q, std::int64_t stride,
                                  __m512i (&sums)[T][B]) {
  for (std::int64_t step = 0; step < Group / 4; step += 2, q += 8) {
    each<2>([&](auto i) TANDEM_INLINED {
      __m512i w[B];
      each<B>([&](auto b) TANDEM_INLINED { w[b] = codes.load(b, step + i); });
      each<T>([&](auto t) TANDEM_INLINED {
        const __m512i four = broadcast4(q + t * stride + 4 * i);
        each<B>([&](auto b) TANDEM_INLINED {
          sums[t][b] = multiply_add_int8(sums[t][b], w[b], four);
        });
      });
    });
  }
}

// Totals that do not fit registers may be in memory, because they are seldom used.
template <Format F, int Group, int T>
TANDEM_INLINE void integer_tile(const Panel& panel, Columns columns, const Activations& x,
                                std::int64_t token, const Results& results, Ahead& ahead) {
  constexpr int B = Shape<F, Group>::kBlocks;
  // Local copies; otherwise the compiler reads them again after each prefetch.
  const std::int64_t stride = x.stride, group_stride = x.group_stride;
  const std::int64_t first = token * group_stride + columns.begin / Group;
  const std::int8_t* q = x.quantized + token * stride + columns.begin;
  const std::int32_t* x_sums = x.sums + first;
  const float* x_scales = x.scales + first;
  __m512 total[T][B];
  results.load(token, 0, total);
  for (std::int64_t g = 0; g < columns.count() / Group; ++g, q += Group) {
    if (g * Group % kPieceColumns == 0) ahead.fetch_piece();
    __m512i sums[T][B];
    each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
      sums[t][b] = _mm512_set1_epi32(kHasMinima<F> ? kSumStart : x_sums[t * group_stride + g]);
    });
    multiply_group<Group, T, B>(Codes<B>(panel, g * (Group / 4)), q, stride, sums);
    each<B>([&](auto b) TANDEM_INLINED {
      const SumScale<F> w_scale(_mm512_load_ps(panel.scales(g, b)));
      each<T>([&](auto t) TANDEM_INLINED {
        const __m512 x_scale = _mm512_set1_ps(x_scales[t * group_stride + g]);
        total[t][b] = _mm512_fmadd_ps(w_scale.times(sums[t][b]), x_scale, total[t][b]);
        if constexpr (kHasMinima<F>) {
          const float x_sum = std::bit_cast<float>(x_sums[t * group_stride + g]);
          total[t][b] = _mm512_fmadd_ps(_mm512_load_ps(panel.minima(g, b)), _mm512_set1_ps(x_sum),
                                        total[t][b]);
        }
      });
    });
  }
  each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
    results.store(token + t, b, total[t][b]);
  });
}

// Broadcasts one step of columns of a token.
template <Format F>
TANDEM_INLINE __m512i broadcast_step(const Activations& x, std::int64_t at) {
  if constexpr (F == Format::kFp16) return broadcast4(x.fp32 + at);
  return broadcast4(x.bf16 + at);
}

template <Format F>
TANDEM_INLINE __m512 multiply_add(__m512 sum, __m512i weights, __m512i values) {
  if constexpr (F == Format::kFp16)
    return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(values), sum);
  return multiply_add_bf16(sum, weights, values);
}

template <int T, int B>
using Sums = __m512[2][T][B];

// Adds products of even steps of columns to sums[0] and of odd ones to sums[1], as with few tokens.
template <Format F, int B, int T>
TANDEM_INLINE void multiply_steps(const Codes<B>& codes, std::int64_t steps, const Activations& x,
                                  std::int64_t at, Sums<T, B>& sums) {
  for (std::int64_t k = 0; k < steps; k += 2) {
    each<2>([&](auto part) TANDEM_INLINED {
      __m512i w[B];
      each<B>([&](auto b) TANDEM_INLINED { w[b] = codes.load(b, k + part); });
      each<T>([&](auto t) TANDEM_INLINED {
        const __m512i value =
            broadcast_step<F>(x, at + t * x.stride + (k + part) * kStepColumns<F>);
        each<B>([&](auto b) TANDEM_INLINED {
          sums[part][t][b] = multiply_add<F>(sums[part][t][b], w[b], value);
        });
      });
    });
  }
}

template <Format F, int T>
TANDEM_INLINE void float_tile(const Panel& panel, Columns columns, const Activations& x,
                              std::int64_t token, const Results& results, Ahead& ahead) {
  constexpr int B = Shape<F, kPieceColumns>::kBlocks;
  Sums<T, B> sums;
  each<2>([&](auto part) TANDEM_INLINED { results.load(token, part, sums[part]); });
  for (std::int64_t k = 0; k < columns.count(); k += kPieceColumns) {
    ahead.fetch_piece();
    const std::int64_t count = std::min(kPieceColumns, columns.count() - k);
    multiply_steps<F, B, T>(Codes<B>(panel, k / kStepColumns<F>),
                            count / kStepColumns<F>, x, token * x.stride + columns.begin + k, sums);
  }
  each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
    results.store(token + t, b, sums[0][t][b], sums[1][t][b]);
  });
}

template <int T>
TANDEM_INLINE void fp8_tile(const Panel& panel, Columns columns, const Activations& x,
                            std::int64_t token, const Results& results, Ahead& ahead) {
  constexpr int B = Shape<Format::kFp8, kPieceColumns>::kBlocks;
  __m512 total[T][B];
  results.load(token, 0, total);
  for (std::int64_t g = 0; g < columns.count() / kPieceColumns; ++g) {
    ahead.fetch_piece();
    Sums<T, B> sums;
    each<2>([&](auto part) TANDEM_INLINED {
      each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
        sums[part][t][b] = _mm512_setzero_ps();
      });
    });
    multiply_steps<Format::kFp8, B, T>(Codes<B>(panel, g * kPieceColumns / 2),
                                       kPieceColumns / 2, x,
                                       token * x.stride + columns.begin + g * kPieceColumns, sums);
    each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
      const __m512 sum = _mm512_add_ps(sums[0][t][b], sums[1][t][b]);
      const __m512 scale = _mm512_load_ps(panel.scales(g, b));
      total[t][b] = _mm512_fmadd_ps(sum, scale, total[t][b]);
    });
  }
  each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
    results.store(token + t, b, total[t][b]);
  });
}

template <Format F, int Group, int T>
TANDEM_INLINE void tile(const Panel& panel, Columns columns, const Activations& x,
                        std::int64_t token, const Results& results, Ahead& ahead) {
  if constexpr (is_integer(F))
    integer_tile<F, Group, T>(panel, columns, x, token, results, ahead);
  else if constexpr (F == Format::kFp8)
    fp8_tile<T>(panel, columns, x, token, results, ahead);
  else
    float_tile<F, T>(panel, columns, x, token, results, ahead);
}

}  // namespace
}  // namespace tandem
