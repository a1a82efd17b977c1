// Many tokens: a chunk of columns of four row blocks is decoded once into a panel that stays in the
// cache, and tiles of four tokens are multiplied with it. Bound by arithmetic.
#pragma once

#include <algorithm>
#include <vector>

#include "weights.hpp"

namespace tandem {
namespace {

constexpr int kPanelBlocks = 4;
constexpr int kTileTokens = 4;

// Columns of a panel: a multiple of every group, and about 32 KB.
template <Format F>
constexpr std::int64_t kPanelColumns = is_integer(F) ? 512 : F == Format::kFp16 ? 128 : 256;

// What one register of the panel holds of each row.
template <Format F>
constexpr std::int64_t kStepColumns = is_integer(F) ? 4 : F == Format::kFp16 ? 1 : 2;

// Sums that a result is made of until its columns have ended; see `few_tokens`.
template <Format F>
constexpr int kParts = F == Format::kBf16 || F == Format::kFp16 ? 2 : 1;

// Row blocks in one tile: sums, totals and weights have 32 registers. With groups of 128 the totals
// are so seldom needed that they may live in memory.
template <Format F>
constexpr int tile_blocks(std::int64_t group) {
  return F == Format::kFp8 || (is_integer(F) && group < 128) ? 2 : 4;
}

// Four row blocks' weights of some columns, ready for the multiplier.
struct Panel {
  // [step of columns][block], one register each.
  alignas(64) std::uint8_t codes[kPanelBlocks * 64 * 128];
  // [group][block], 16 rows each.
  alignas(64) float scales[kPanelBlocks * 16 * 16];
  alignas(64) float minima[kPanelBlocks * 16 * 16];

  __m512i* at(std::int64_t step, int block) {
    return reinterpret_cast<__m512i*>(codes) + step * kPanelBlocks + block;
  }
};

struct Columns {
  std::int64_t begin, end;
};

// Bytes of so many columns of a block.
constexpr std::int64_t code_bytes(Format format, std::int64_t columns) {
  return columns * kBlockRows * bits_per_code(format) / 8;
}

inline const std::uint8_t* codes_at(const PackedMatrix& m, std::int64_t block, std::int64_t column) {
  return m.data + code_bytes(m.format, block * m.cols + column);
}

inline std::int64_t groups(const PackedMatrix& m, std::int64_t columns) {
  return m.group == 0 ? 0 : columns / m.group;
}

template <Format F>
TANDEM_INLINE void fill_codes(Panel& panel, const PackedMatrix& m, std::int64_t block, int b,
                              Columns columns) {
  const std::uint8_t* data = codes_at(m, block, columns.begin);
  const std::int64_t num_columns = columns.end - columns.begin;
  if constexpr (is_integer(F)) {
    for (std::int64_t k = 0; k < num_columns; k += kLineColumns<F>, data += 64) {
      __m512i w[2];
      load_codes<F>(data, w);
      for (int i = 0; i < kLineColumns<F> / 4; ++i)
        _mm512_store_si512(panel.at(k / 4 + i, b), w[i]);
    }
  } else if constexpr (F == Format::kBf16) {
    for (std::int64_t k = 0; k < num_columns; k += 2, data += 64)
      _mm512_store_si512(panel.at(k / 2, b), _mm512_loadu_si512(data));
  } else if constexpr (F == Format::kFp8) {
    const E4m3Decoder decoder;
    for (std::int64_t k = 0; k < num_columns; k += 4, data += 64) {
      __m512i w[2];
      decoder.decode(data, w);
      for (int i = 0; i < 2; ++i) _mm512_store_si512(panel.at(k / 2 + i, b), w[i]);
    }
  } else {
    for (std::int64_t k = 0; k < num_columns; k += 2, data += 64) {
      const __m512i w = _mm512_loadu_si512(data);  // 16 pairs of two columns
      _mm512_store_ps(panel.at(k, b), _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w)));
      _mm512_store_ps(panel.at(k + 1, b),
                      _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16))));
    }
  }
}

template <Format F>
void fill_panel(Panel& panel, const PackedMatrix& m, std::int64_t block, int num_blocks,
                Columns columns) {
  for (int b = 0; b < num_blocks; ++b) {
    fill_codes<F>(panel, m, block + b, b, columns);
    if constexpr (F != Format::kBf16 && F != Format::kFp16) {
      const std::int64_t first = (block + b) * (m.cols / m.group) + columns.begin / m.group;
      for (std::int64_t g = 0; g < (columns.end - columns.begin) / m.group; ++g) {
        const std::int64_t at = (g * kPanelBlocks + b) * kBlockRows;
        _mm512_store_ps(panel.scales + at, load_scales<F>(m.scales, first + g));
        if constexpr (F == Format::kInt4Zero)
          _mm512_store_ps(panel.minima + at, load_minima(m.scales, first + g));
      }
    }
  }
}

// Results so far: [token][block][part], one register each.
struct Totals {
  float* values;
  int parts;

  float* at(std::int64_t token, int block, int part = 0) const {
    return values + ((token * kPanelBlocks + block) * parts + part) * kBlockRows;
  }

  // Zero before the first columns.
  __m512 load(Columns columns, std::int64_t token, int block, int part = 0) const {
    return columns.begin == 0 ? _mm512_setzero_ps() : _mm512_load_ps(at(token, block, part));
  }
};

// Calls function(token, block) for every pair of a tile.
template <int T, int B, typename Function>
TANDEM_INLINE void each_pair(const Function& function) {
  each<T>([&](auto t) TANDEM_INLINED {
    each<B>([&](auto b) TANDEM_INLINED { function(t, b); });
  });
}

template <int T, int B>
TANDEM_INLINE void multiply_group(const __m512i* codes, std::int64_t steps, const std::int8_t* q,
                                  std::int64_t stride, __m512i (&sums)[T][B]) {
  for (std::int64_t k = 0; k < steps; ++k, codes += kPanelBlocks, q += 4) {
    __m512i w[B];
    each<B>([&](auto b) TANDEM_INLINED { w[b] = _mm512_load_si512(codes + b); });
    each<T>([&](auto t) TANDEM_INLINED {
      const __m512i four = broadcast4(q + t * stride);
      each<B>([&](auto b) TANDEM_INLINED { sums[t][b] = multiply_add_int8(sums[t][b], w[b], four); });
    });
  }
}

template <Format F, int B, int T>
TANDEM_INLINE void integer_tile(Panel& panel, int first_block, std::int64_t group, Columns columns,
                                const Activations& x, std::int64_t token, const Totals& totals) {
  const std::int8_t* q = x.quantized + token * x.stride + columns.begin;
  const std::int64_t first = token * x.group_stride + columns.begin / group;
  __m512 total[T][B];
  each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
    total[t][b] = totals.load(columns, token + t, first_block + b);
  });
  for (std::int64_t g = 0; g < (columns.end - columns.begin) / group; ++g, q += group) {
    const std::int32_t* x_sums = x.sums + first + g;
    const float* x_scales = x.scales + first + g;
    __m512i sums[T][B];
    each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
      sums[t][b] = F == Format::kInt4Zero ? _mm512_setzero_si512()
                                          : _mm512_set1_epi32(x_sums[t * x.group_stride]);
    });
    const __m512i* codes = panel.at(g * group / 4, first_block);
    if (B == 2 && group == 32)  // a known number of steps is unrolled
      multiply_group<T, B>(codes, 32 / 4, q, x.stride, sums);
    else
      multiply_group<T, B>(codes, group / 4, q, x.stride, sums);
    const std::int64_t at = (g * kPanelBlocks + first_block) * kBlockRows;
    each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
      const float x_scale = x_scales[t * x.group_stride];
      const __m512 w_scale = _mm512_load_ps(panel.scales + at + b * kBlockRows);
      const __m512 scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(x_scale));
      total[t][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t][b]), scale, total[t][b]);
      if constexpr (F == Format::kInt4Zero) {
        const float x_sum = x_scale * static_cast<float>(x_sums[t * x.group_stride]);
        const __m512 minima = _mm512_load_ps(panel.minima + at + b * kBlockRows);
        total[t][b] = _mm512_fmadd_ps(minima, _mm512_set1_ps(x_sum), total[t][b]);
      }
    });
  }
  each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
    _mm512_store_ps(totals.at(token + t, first_block + b), total[t][b]);
  });
}

// A step's columns of a token, in all lanes.
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

// Adds the products of every second one of `steps` steps of columns to sums[token][block].
template <Format F, int B, int T>
TANDEM_INLINE void multiply_steps(const __m512i* codes, std::int64_t steps, const Activations& x,
                                  std::int64_t at, __m512 (&sums)[T][B]) {
  for (std::int64_t k = 0; k < steps; k += 2, codes += 2 * kPanelBlocks, at += 2 * kStepColumns<F>) {
    __m512i w[B];
    each<B>([&](auto b) TANDEM_INLINED { w[b] = _mm512_load_si512(codes + b); });
    each<T>([&](auto t) TANDEM_INLINED {
      const __m512i value = broadcast_step<F>(x, at + t * x.stride);
      each<B>([&](auto b) TANDEM_INLINED {
        sums[t][b] = multiply_add<F>(sums[t][b], w[b], value);
      });
    });
  }
}

// bf16 and fp16: even steps of columns, then odd ones, as with few tokens.
template <Format F, int B, int T>
TANDEM_INLINE void float_tile(Panel& panel, int first_block, Columns columns, const Activations& x,
                              std::int64_t token, const Totals& totals) {
  for (int part = 0; part < 2; ++part) {
    __m512 sums[T][B];
    each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
      sums[t][b] = totals.load(columns, token + t, first_block + b, part);
    });
    multiply_steps<F, B, T>(panel.at(part, first_block),
                            (columns.end - columns.begin) / kStepColumns<F>, x,
                            token * x.stride + columns.begin + part * kStepColumns<F>, sums);
    each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
      _mm512_store_ps(totals.at(token + t, first_block + b, part), sums[t][b]);
    });
  }
}

template <int B, int T>
TANDEM_INLINE void fp8_tile(Panel& panel, int first_block, std::int64_t group, Columns columns,
                            const Activations& x, std::int64_t token, const Totals& totals) {
  __m512 total[T][B];
  each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
    total[t][b] = totals.load(columns, token + t, first_block + b);
  });
  for (std::int64_t g = 0; g < (columns.end - columns.begin) / group; ++g) {
    __m512 sums[2][T][B];
    each<2>([&](auto part) TANDEM_INLINED {
      each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
        sums[part][t][b] = _mm512_setzero_ps();
      });
      multiply_steps<Format::kFp8, B, T>(
          panel.at(g * group / 2 + part, first_block), group / 2, x,
          token * x.stride + columns.begin + g * group + 2 * part, sums[part]);
    });
    each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
      const float* scale = panel.scales + (g * kPanelBlocks + first_block + b) * kBlockRows;
      const __m512 sum = _mm512_add_ps(sums[0][t][b], sums[1][t][b]);
      total[t][b] = _mm512_fmadd_ps(sum, _mm512_load_ps(scale), total[t][b]);
    });
  }
  each_pair<T, B>([&](auto t, auto b) TANDEM_INLINED {
    _mm512_store_ps(totals.at(token + t, first_block + b), total[t][b]);
  });
}

template <Format F, int B, int T>
void tile(Panel& panel, int first_block, std::int64_t group, Columns columns, const Activations& x,
          std::int64_t token, const Totals& totals) {
  if constexpr (is_integer(F))
    integer_tile<F, B, T>(panel, first_block, group, columns, x, token, totals);
  else if constexpr (F == Format::kFp8)
    fp8_tile<B, T>(panel, first_block, group, columns, x, token, totals);
  else
    float_tile<F, B, T>(panel, first_block, columns, x, token, totals);
}

// A region of memory that is fetched into the cache piece by piece: `num_rows` runs of `bytes`.
class Region {
 public:
  Region(const std::uint8_t* start, std::int64_t stride, std::int64_t bytes, int num_rows,
         std::int64_t pieces)
      : at_(start), stride_(stride), bytes_(bytes), left_(num_rows * bytes),
        piece_(left_ / pieces + 64) {}

  void fetch_piece() {
    for (const std::int64_t stop = std::max<std::int64_t>(0, left_ - piece_); left_ > stop;
         left_ -= 64) {
      _mm_prefetch(reinterpret_cast<const char*>(at_ + done_), _MM_HINT_T1);
      done_ += 64;
      if (done_ >= bytes_) {
        done_ = 0;
        at_ += stride_;
      }
    }
  }

 private:
  const std::uint8_t* at_;
  std::int64_t stride_, bytes_, left_, piece_, done_ = 0;
};

// What the next panel is made of, fetched while this one is multiplied: decoding would else wait
// for memory.
template <Format F>
struct Ahead {
  Region codes, scales;

  Ahead(const PackedMatrix& m, std::int64_t block, int num_blocks, Columns columns,
        std::int64_t pieces)
      : codes(codes_at(m, block, columns.begin), code_bytes(F, m.cols),
              code_bytes(F, columns.end - columns.begin), num_blocks, pieces),
        scales(m.scales + (block * groups(m, m.cols) + groups(m, columns.begin)) * kScaleBytes<F>,
               groups(m, m.cols) * kScaleBytes<F>,
               groups(m, columns.end - columns.begin) * kScaleBytes<F>, num_blocks, pieces) {}

  void fetch_piece() {
    codes.fetch_piece();
    scales.fetch_piece();
  }
};

template <Format F, int B>
void multiply_panel(Panel& panel, std::int64_t group, Columns columns, const Activations& x,
                    std::int64_t num_tokens, const Totals& totals, Ahead<F> ahead) {
  std::int64_t t = 0;
  for (; t + kTileTokens <= num_tokens; t += kTileTokens) {
    ahead.fetch_piece();
    for (int b = 0; b < kPanelBlocks; b += B)
      tile<F, B, kTileTokens>(panel, b, group, columns, x, t, totals);
  }
  for (; t < num_tokens; ++t)
    for (int b = 0; b < kPanelBlocks; b += B) tile<F, B, 1>(panel, b, group, columns, x, t, totals);
}

template <Format F>
void store_totals(const PackedMatrix& m, std::int64_t block, int num_blocks, const Totals& totals,
                  std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  Output to[kPanelBlocks];
  for (int b = 0; b < num_blocks; ++b) to[b] = Output::of(m, block + b, num_rows, out, stride);
  for (std::int64_t t = 0; t < num_tokens; ++t)
    for (int b = 0; b < num_blocks; ++b) {
      __m512 sum = _mm512_load_ps(totals.at(t, b));
      if constexpr (kParts<F> == 2) sum = _mm512_add_ps(sum, _mm512_load_ps(totals.at(t, b, 1)));
      to[b].store(t, sum);
    }
}

// Registers want their memory aligned.
class Scratch {
 public:
  float* of(std::int64_t registers) {
    if (static_cast<std::int64_t>(memory_.size()) < registers) memory_.resize(registers);
    return memory_.data()->values;
  }

 private:
  struct alignas(64) Line {
    float values[16];
  };
  std::vector<Line> memory_;
};

template <Format F>
void many_tokens(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
                 std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  thread_local Panel panel;
  thread_local Scratch scratch;
  const Totals totals{scratch.of(num_tokens * kPanelBlocks * kParts<F>), kParts<F>};
  const auto columns_from = [&](std::int64_t k) {
    return Columns{k, std::min(k + kPanelColumns<F>, m.cols)};
  };
  for (std::int64_t block = begin; block < end; block += kPanelBlocks) {
    const auto blocks_from = [&](std::int64_t first) {
      return static_cast<int>(std::clamp<std::int64_t>(end - first, 0, kPanelBlocks));
    };
    for (std::int64_t k = 0; k < m.cols; k += kPanelColumns<F>) {
      const Columns columns = columns_from(k);
      const bool is_last = columns.end == m.cols;
      const std::int64_t next = is_last ? block + kPanelBlocks : block;
      const Ahead<F> ahead(m, next, blocks_from(next), columns_from(is_last ? 0 : columns.end),
                           num_tokens / kTileTokens);
      fill_panel<F>(panel, m, block, blocks_from(block), columns);
      if (tile_blocks<F>(m.group) == 4)
        multiply_panel<F, 4>(panel, m.group, columns, x, num_tokens, totals, ahead);
      else
        multiply_panel<F, 2>(panel, m.group, columns, x, num_tokens, totals, ahead);
    }
    store_totals<F>(m, block, blocks_from(block), totals, num_tokens, num_rows, out, stride);
  }
}

}  // namespace
}  // namespace tandem
