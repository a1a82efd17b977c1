// Floating-point formats on 256-bit registers: every weight becomes fp32.
#pragma once

#include "ahead.hpp"
#include "output.hpp"

namespace tandem {
namespace {

// Converts 64 bytes (`kCols` columns of 16 rows) to fp32, two columns at a time, and one token's
// activations with them. `arrange` restores the order of the rows in sums.
template <Format F>
struct FloatCode;

inline __m256i load_dwords(const std::uint8_t* data) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

inline __m256 first_bf16(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

inline __m256 second_bf16(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}

struct Bf16Activations {
  // Broadcasts columns k and k + 1 of a token.
  static void broadcast2(const Activations& x, std::int64_t token, std::int64_t k,
                         __m256 (&values)[2]) {
    std::int32_t two;
    std::memcpy(&two, x.bf16 + token * x.stride + k, sizeof two);
    values[0] = first_bf16(_mm256_set1_epi32(two));
    values[1] = second_bf16(_mm256_set1_epi32(two));
  }

  static __m256 load8(const Activations& x, std::int64_t token, std::int64_t k) {
    const auto* at = reinterpret_cast<const __m128i*>(x.bf16 + token * x.stride + k);
    return first_bf16(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)));
  }
};

template <>
struct FloatCode<Format::kBf16> : Bf16Activations {
  static constexpr int kCols = 2;

  static void decode2(const std::uint8_t* data, int half, int, __m256 (&columns)[2]) {
    const __m256i pairs = load_dwords(data + 32 * half);
    columns[0] = first_bf16(pairs);
    columns[1] = second_bf16(pairs);
  }

  static __m256 arrange(__m256 sums) { return sums; }
};

template <>
struct FloatCode<Format::kFp16> {
  static constexpr int kCols = 2;

  // Taking every second number of two registers gives the row order 0 1 4 5 2 3 6 7.
  static void decode2(const std::uint8_t* data, int half, int, __m256 (&columns)[2]) {
    const auto* at = reinterpret_cast<const __m128i*>(data + 32 * half);
    const __m256 rows03 = _mm256_cvtph_ps(_mm_loadu_si128(at));
    const __m256 rows47 = _mm256_cvtph_ps(_mm_loadu_si128(at + 1));
    columns[0] = _mm256_shuffle_ps(rows03, rows47, 0x88);
    columns[1] = _mm256_shuffle_ps(rows03, rows47, 0xDD);
  }

  static __m256 arrange(__m256 sums) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xD8));
  }

  static void broadcast2(const Activations& x, std::int64_t token, std::int64_t k,
                         __m256 (&values)[2]) {
    const float* at = x.fp32 + token * x.stride + k;
    for (int i = 0; i < 2; ++i) values[i] = _mm256_broadcast_ss(at + i);
  }

  static __m256 load8(const Activations& x, std::int64_t token, std::int64_t k) {
    return _mm256_loadu_ps(x.fp32 + token * x.stride + k);
  }
};

template <>
struct FloatCode<Format::kFp8> : Bf16Activations {
  static constexpr int kCols = 4;

  // Moves the bits of e4m3 to fp32's sign, exponent and mantissa, which gives the value times
  // 2^-120, also for subnormals. NaN would become 480, but no packed matrix has one.
  static void decode2(const std::uint8_t* data, int half, int pair, __m256 (&columns)[2]) {
    const __m256i codes = load_dwords(data + 32 * half);
    const __m256i kept = _mm256_set1_epi32(static_cast<std::int32_t>(0x87F00000));
    const __m256 unbias = _mm256_set1_ps(0x1p120f);
    for (int c = 0; c < 2; ++c) {
      const __m256i top = _mm256_slli_epi32(codes, 24 - 8 * (2 * pair + c));
      const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(top, 4), kept);
      columns[c] = _mm256_mul_ps(_mm256_castsi256_ps(bits), unbias);
    }
  }

  static __m256 arrange(__m256 sums) { return sums; }
};

// Columns that share a scale. Formats without scales are summed in parts of the same size.
constexpr std::int64_t kPartCols = 128;

template <Format F>
__m256 scale_of(const PackedMatrix& m, std::int64_t block, std::int64_t k) {
  if constexpr (F != Format::kFp8) return _mm256_set1_ps(1.0f);
  const auto* scales = reinterpret_cast<const float*>(m.scales);
  return _mm256_set1_ps(scales[block * (m.cols / m.group) + k / m.group]);
}

template <Format F>
constexpr std::int64_t bytes_of_block(std::int64_t cols) {
  return code_bytes(F, cols);
}

template <Format F, int T>
void add_part(Totals<T>& total, const Totals<T>& part, __m256 scale) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
    for (int h = 0; h < kHalves; ++h)
      total[t][h] = F == Format::kFp8 ? _mm256_fmadd_ps(part[t][h], scale, total[t][h])
                                      : _mm256_add_ps(part[t][h], total[t][h]);
}

template <Format F, int T>
void arrange(Totals<T>& total) {
  for (auto& sums : total)
    for (__m256& sum : sums) sum = FloatCode<F>::arrange(sum);
}

// A block's sums have one order of additions for any number of tokens, so that a result does not
// depend on the batch: in each part, first the even columns, then the odd ones. Few tokens compute
// both sums at once, because a multiply-add has a latency of four cycles and two start per cycle.
// More tokens have too many sums for the registers, and go through a part twice.
enum class Parity { kEven = 0, kOdd = 1, kBoth = 2 };

template <Format F, int T, Parity P>
void add_columns(const Product& p, const std::uint8_t* data, std::int64_t token, std::int64_t begin,
                 std::int64_t end, Totals<T> (&sums)[2]) {
  using Code = FloatCode<F>;
  constexpr int kStep = 4;  // columns; `cols` is a multiple of 8
  constexpr int kFirst = P == Parity::kOdd ? 1 : 0;
  constexpr int kLast = P == Parity::kEven ? 0 : 1;
  for (std::int64_t k = begin; k < end; k += kStep, data += code_bytes(F, kStep)) {
#pragma GCC unroll 2
    for (int c = 0; c < kStep; c += 2) {
      const std::uint8_t* chunk = data + 64 * (c / Code::kCols);
      if (kFirst == 0 && c % Code::kCols == 0)
        fetch_stream(chunk);
      __m256 w[kHalves][2];
      for (int h = 0; h < kHalves; ++h) Code::decode2(chunk, h, c % Code::kCols / 2, w[h]);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        __m256 x[2];
        Code::broadcast2(p.x, token + t, k + c, x);
        for (int j = kFirst; j <= kLast; ++j)
          for (int h = 0; h < kHalves; ++h)
            sums[j][t][h] = _mm256_fmadd_ps(w[h][j], x[j], sums[j][t][h]);
      }
    }
  }
}

template <int T>
void clear(Totals<T>& sums) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) sums[t][0] = sums[t][1] = _mm256_setzero_ps();
}

// Multiplies one block, read from memory, by T tokens.
template <Format F, int T>
void float_row_tile(const Product& p, std::int64_t b, std::int64_t token, const Output& out) {
  const std::uint8_t* data = p.m.data + b * bytes_of_block<F>(p.m.cols);
  Totals<T> total;
  out.load<T>(total);
  for (std::int64_t k = 0; k < p.m.cols; k += kPartCols) {
    Totals<T> sums[2];
    for (auto& sum : sums) clear<T>(sum);
    const std::int64_t end = smaller(k + kPartCols, p.m.cols);
    if constexpr (T <= 2) {
      add_columns<F, T, Parity::kBoth>(p, data, token, k, end, sums);
    } else {
      add_columns<F, T, Parity::kEven>(p, data, token, k, end, sums);
      add_columns<F, T, Parity::kOdd>(p, data, token, k, end, sums);
    }
    data += bytes_of_block<F>(end - k);
    for (const auto& sum : sums) add_part<F, T>(total, sum, scale_of<F>(p.m, b, k));
  }
  arrange<F, T>(total);
  out.store<T>(total);
}

// Activations of a batch of tokens in one part's columns, as fp32.
template <Format F, std::int64_t Batch>
struct ActivationPanel {
  alignas(64) float values[Batch][kPartCols];

  void fill(const Activations& x, std::int64_t token, std::int64_t num_tokens, std::int64_t k,
            std::int64_t width) {
    for (std::int64_t t = 0; t < num_tokens; ++t)
      for (std::int64_t i = 0; i < width; i += 8)
        _mm256_store_ps(values[t] + i, FloatCode<F>::load8(x, token + t, k + i));
  }
};

// Weights of one part of a block as fp32: 16 rows per column.
template <Format F>
struct WeightPanel {
  alignas(64) float values[kPartCols][kBlockRows];

  void fill(const std::uint8_t* data, std::int64_t width) {
    using Code = FloatCode<F>;
    for (std::int64_t k = 0; k < width; k += Code::kCols, data += 64)
      for (int c = 0; c < Code::kCols; c += 2)
        for (int h = 0; h < kHalves; ++h) {
          __m256 columns[2];
          Code::decode2(data, h, c / 2, columns);
          for (int j = 0; j < 2; ++j)
            _mm256_store_ps(values[k + c + j] + 8 * h, Code::arrange(columns[j]));
        }
  }
};

// Adds every second column from `first` on.
template <Format F, int T>
void add_panel_columns(const WeightPanel<F>& weights, const float (*x)[kPartCols],
                       std::int64_t first, std::int64_t width, Totals<T>& out) {
  Totals<T> sums;  // local, because sums in memory would be written at every step
  clear<T>(sums);
  for (std::int64_t k = first; k < width; k += 2) {
    const __m256 w0 = _mm256_load_ps(weights.values[k]);
    const __m256 w1 = _mm256_load_ps(weights.values[k] + 8);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256 value = _mm256_broadcast_ss(&x[t][k]);
      sums[t][0] = _mm256_fmadd_ps(w0, value, sums[t][0]);
      sums[t][1] = _mm256_fmadd_ps(w1, value, sums[t][1]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
    for (int h = 0; h < kHalves; ++h) out[t][h] = sums[t][h];
}

template <Format F, int T>
void float_panel_tile(const WeightPanel<F>& weights, const float (*x)[kPartCols], std::int64_t width,
                      __m256 scale, const Output& out) {
  Totals<T> sums[2];
  for (int parity = 0; parity < 2; ++parity)
    add_panel_columns<F, T>(weights, x, parity, width, sums[parity]);
  Totals<T> total;
  out.load<T>(total);
  for (const auto& sum : sums) add_part<F, T>(total, sum, scale);
  out.store<T>(total);
}

// Up to this number of tokens, filling a panel costs more than it saves (measured on Zen 4).
template <Format F>
constexpr std::int64_t kMostFloatsStreamed = F == Format::kFp8 ? 4 : 8;

template <Format F>
void few_float_tokens(const Product& p, std::int64_t begin, std::int64_t end,
                      std::int64_t num_tokens) {
  for (std::int64_t b = begin; b < end; ++b) {
    const Output out = p.block(b, true, true);
    in_tiles<kStreamedTile>(num_tokens, [&]<int T>(std::int64_t t) {
      float_row_tile<F, T>(p, b, t, out.token(t));
    });
  }
}

template <Format F>
void many_float_tokens(const Product& p, std::int64_t begin, std::int64_t end,
                       std::int64_t num_tokens) {
  constexpr int kTile = 6;  // 12 sums, two weights and an activation fit 16 registers
  constexpr std::int64_t kBatch = 48;
  ActivationPanel<F, kBatch> x;
  WeightPanel<F> weights;
  for (std::int64_t batch = 0; batch < num_tokens; batch += kBatch) {
    const std::int64_t count = smaller(kBatch, num_tokens - batch);
    for (std::int64_t k = 0; k < p.m.cols; k += kPartCols) {
      const std::int64_t width = smaller(kPartCols, p.m.cols - k);
      x.fill(p.x, batch, count, k, width);
      for (std::int64_t b = begin; b < end; ++b) {
        const auto data_at = [&](std::int64_t block, std::int64_t column) {
          return p.m.data + bytes_of_block<F>(block * p.m.cols + column);
        };
        weights.fill(data_at(b, k), width);
        const std::uint8_t* next = b + 1 < end ? data_at(b + 1, k) : data_at(begin, k + width);
        Pieces ahead(next, bytes_of_block<F>(width), num_tiles(count, kTile));
        const Output out = p.block(b, k == 0, k + width == p.m.cols).token(batch);
        in_tiles<kTile>(count, [&]<int T>(std::int64_t t) {
          ahead.fetch_next();
          float_panel_tile<F, T>(weights, x.values + t, width, scale_of<F>(p.m, b, k), out.token(t));
        });
      }
    }
  }
}

template <Format F>
void multiply_float(const Product& p, std::int64_t begin, std::int64_t end,
                    std::int64_t num_tokens) {
  if (num_tokens <= kMostFloatsStreamed<F>) return few_float_tokens<F>(p, begin, end, num_tokens);
  many_float_tokens<F>(p, begin, end, num_tokens);
}

inline void multiply_floats(const Product& p, std::int64_t begin, std::int64_t end,
                            std::int64_t num_tokens) {
  end = last_block(end, p.num_rows);
  switch (p.m.format) {
    case Format::kBf16: return multiply_float<Format::kBf16>(p, begin, end, num_tokens);
    case Format::kFp16: return multiply_float<Format::kFp16>(p, begin, end, num_tokens);
    case Format::kFp8: return multiply_float<Format::kFp8>(p, begin, end, num_tokens);
    default: return;
  }
}

}  // namespace
}  // namespace tandem
