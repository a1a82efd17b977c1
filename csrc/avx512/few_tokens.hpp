// For few tokens: the weights stream through the registers once and are multiplied at once. Integers take two row
// blocks at a time, so that a broadcast activation is read once for both, and memory gives two streams sooner; but
// one token with minima, which two scales and two minima of each block would slow down.
// Bound by memory up to about four tokens, by arithmetic for more.
#pragma once

#include <algorithm>

#include "weights.hpp"

namespace tandem {
namespace {

// The hardware prefetcher stops at the end of a page. Prefetching 1 to 6 KB ahead made int4 with
// one token a third faster (Sapphire Rapids, 2 threads). The second-level cache is the target
// because the first level has few fill buffers; that gained a twentieth with two cores.
constexpr std::int64_t kAheadBytes = 4096;

TANDEM_INLINE void prefetch(const std::uint8_t* data, std::int64_t ahead) {
  _mm_prefetch(reinterpret_cast<const char*>(data + ahead), _MM_HINT_T1);
}

// A group's scales are read once, in a stream too slow for the hardware prefetcher. Without this
// they cost a third of the time with eight tokens. `groups` ahead is the same position in the next
// block.
template <Format F>
TANDEM_INLINE void prefetch_scales(const PackedMatrix& m, std::int64_t block, std::int64_t index,
                                   std::int64_t groups) {
  const std::uint8_t* next = scales_at<F>(m, block + 1, index + groups);
  _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
}

// Fewer than five sums need two chains each to hide the multiplier's latency.
template <int Sums>
constexpr int kIntegerChains = Sums < 5 ? 2 : 1;

// How many fours of columns share a cache line, in the widest plane of bits.
template <Format F>
constexpr int kFoursOfLine = kBits<F> & 8 ? 1 : kBits<F> & 4 ? 2 : kBits<F> & 2 ? 4 : 8;

// Addresses of row blocks, which are `step` bytes apart, and the distance of the prefetch. From `turn` on lines
// that near are the other block's, which is read at the same time: then it is the next pair's that are fetched.
struct Strips {
  const std::uint8_t* first;
  std::int64_t step, ahead;
  const std::uint8_t* turn;

  static Strips of_blocks(const std::uint8_t* first, std::int64_t bytes, std::int64_t step,
                          std::int64_t ahead) {
    return {first, step, ahead, first + bytes - (ahead < step ? ahead : 0)};
  }

  TANDEM_INLINE const std::uint8_t* of(int b) const { return first + b * step; }
  TANDEM_INLINE std::int64_t distance() const { return first < turn ? ahead : ahead + step; }
};

// The activations of T tokens, or of T - 1: then the last one is used twice. This saves kernels and
// takes no longer.
template <int T>
struct FewRows {
  const Activations& x;
  std::int64_t last;  // index of the last token

  template <typename Index>
  TANDEM_INLINE std::int64_t number(Index t) const {
    return t < T - 1 ? t : last;
  }
};

template <int T, int B>
using FewSums = __m512i[kIntegerChains<T * B>][B][T];

// Multiplies group `Part` of a strip of each block, or the whole strip.
template <Format F, int Part, int T, int B>
TANDEM_INLINE void multiply_strip(const Strips& strips, const std::int8_t* q,
                                  const FewRows<T>& rows, FewSums<T, B>& sums) {
  constexpr int kCount = kFoursOfStrip / kGroupsOfStrip<F>;
  const std::int64_t ahead = strips.distance();
  each<kCount>([&](auto i) TANDEM_INLINED {
    constexpr int J = Part * kCount + decltype(i)::value;
    constexpr int kChain = J % kIntegerChains<T * B>;
    // Prefetches are issued one by one, because they delay each other if they come together. The
    // barrier keeps the compiler from gathering them, and keeps the uses of a line together.
    if constexpr (J % kFoursOfLine<F> == 0) asm volatile("" ::: "memory");
    constexpr int kLines = kStripBytes<F> / 64, kLine = J * kLines / kFoursOfStrip;
    __m512i w[B];
    each<B>([&](auto b) TANDEM_INLINED {
      each<(J + 1) * kLines / kFoursOfStrip - kLine>(
          [&](auto line) TANDEM_INLINED { prefetch(strips.of(b) + 64 * (kLine + line), ahead); });
      w[b] = codes_of<Bytes64, F, J>(strips.of(b));
    });
    each<T>([&](auto t) TANDEM_INLINED {
      const __m512i four = broadcast4(q + rows.number(t) * rows.x.stride + 4 * J);
      each<B>([&](auto b) TANDEM_INLINED {
        sums[kChain][b][t] = multiply_add_int8(sums[kChain][b][t], w[b], four);
      });
    });
  });
}

// One or two row blocks of a matrix; `second` is the distance of the second, 0 if there is none.
struct FewBlocks {
  std::int64_t first, second;

  TANDEM_INLINE std::int64_t of(int b) const { return b == 0 ? first : first + second; }
};

// Adds the products of one group; `g` is its index in a row, `Part` its index in the strip.
template <Format F, int Part, int T, int B>
TANDEM_INLINE void few_of_group(const PackedMatrix& m, FewBlocks blocks, std::int64_t g,
                                Strips strips, const FewRows<T>& rows, __m512 (&total)[B][T]) {
  constexpr int kLast = kIntegerChains<T * B> - 1;
  const Activations& x = rows.x;
  const std::int64_t groups = m.cols / m.group;
  const auto at = [&](auto t) TANDEM_INLINED { return rows.number(t) * x.group_stride + g; };
  FewSums<T, B> sums;
  each<T>([&](auto t) TANDEM_INLINED {
    each<B>([&](auto b) TANDEM_INLINED {
      sums[kLast][b][t] = _mm512_setzero_si512();
      sums[0][b][t] = _mm512_set1_epi32(kHasMinima<F> ? kSumStart : x.sums[at(t)]);
    });
  });
  const std::int8_t* q = x.quantized + g / kGroupsOfStrip<F> * kGroupsOfStrip<F> * m.group;
  for (std::int64_t k = 0; k < m.group; k += kStripCols, strips.first += code_bytes(F, kStripCols))
    multiply_strip<F, Part, T, B>(strips, q + k, rows, sums);
  each<B>([&](auto b) TANDEM_INLINED {
    const std::int64_t block = blocks.of(b), index = block * groups + g;
    prefetch_scales<F>(m, block, index, B * groups);
    const SumScale<F> w_scale(load_scales<F>(m, block, index));
    [[maybe_unused]] __m512 minima;
    if constexpr (kHasMinima<F>) minima = load_minima<F>(m, block, index);
    each<T>([&](auto t) TANDEM_INLINED {
      const __m512 x_scale = _mm512_set1_ps(x.scales[at(t)]);
      __m512i sum = sums[0][b][t];
      if constexpr (kLast > 0) sum = _mm512_add_epi32(sum, sums[1][b][t]);
      total[b][t] = _mm512_fmadd_ps(w_scale.times(sum), x_scale, total[b][t]);
      if constexpr (kHasMinima<F>)
        total[b][t] = _mm512_fmadd_ps(minima, _mm512_set1_ps(x.scaled_sum(at(t))), total[b][t]);
    });
  });
}

// Multiplies B row blocks by `num_tokens` tokens, T or one less; results go to `out`.
template <Format F, int T, int B>
void few_integer(const PackedMatrix& m, FewBlocks blocks, const Activations& x,
                 std::int64_t num_tokens, std::int64_t ahead, const Output* out) {
  constexpr int kParts = kGroupsOfStrip<F>;
  const std::int64_t groups = m.cols / m.group, block_bytes = code_bytes(F, m.cols);
  const FewRows<T> rows{x, num_tokens - 1};
  Strips strips = Strips::of_blocks(m.data + blocks.first * block_bytes, block_bytes,
                                    blocks.second * block_bytes, ahead);
  __m512 total[B][T];
  each<T>([&](auto t) TANDEM_INLINED {
    each<B>([&](auto b) TANDEM_INLINED { total[b][t] = _mm512_setzero_ps(); });
  });
  for (std::int64_t g = 0; g < groups; g += kParts, strips.first += code_bytes(F, kParts * m.group))
    each<kParts>([&](auto part) TANDEM_INLINED {
      few_of_group<F, decltype(part)::value, T, B>(m, blocks, g + part, strips, rows, total);
    });
  each<T>([&](auto t) TANDEM_INLINED {
    if (t < num_tokens)
      each<B>([&](auto b) TANDEM_INLINED {
        if (b == 0 || blocks.second > 0) out[b].store(t, total[b][t]);
      });
  });
}

template <int T>
TANDEM_INLINE void clear(__m512 (&sums)[2][T]) {
  each<T>([&](auto t) TANDEM_INLINED { sums[0][t] = sums[1][t] = _mm512_setzero_ps(); });
}

// Even and odd pairs of columns have separate sums, as with many tokens, so that a result does not
// depend on the number of tokens.
template <int T>
void few_bf16(const PackedMatrix& m, std::int64_t block, const Activations& x, std::int64_t ahead,
              const Output& out) {
  const std::uint8_t* data = m.data + block * m.cols * kBlockRows * 2;
  __m512 sums[2][T];
  clear(sums);
  for (std::int64_t k = 0; k < m.cols; k += 4, data += 128) {
    each<2>([&](auto i) TANDEM_INLINED {
      prefetch(data + 64 * i, ahead);
      const __m512i w = _mm512_loadu_si512(data + 64 * i);
      each<T>([&](auto t) TANDEM_INLINED {
        const std::uint16_t* at = x.bf16 + t * x.stride + k + 2 * i;
        sums[i][t] = multiply_add_bf16(sums[i][t], w, broadcast4(at));
      });
    });
  }
  each<T>([&](auto t) TANDEM_INLINED { out.store(t, _mm512_add_ps(sums[0][t], sums[1][t])); });
}

template <int T>
void few_fp8(const PackedMatrix& m, std::int64_t block, const Activations& x, std::int64_t ahead,
             const Output& out) {
  const E4m3Decoder decoder;
  const std::int64_t groups = m.cols / m.group;
  const std::uint8_t* data = m.data + block * m.cols * kBlockRows;
  __m512 total[T];
  each<T>([&](auto t) TANDEM_INLINED { total[t] = _mm512_setzero_ps(); });
  for (std::int64_t g = 0; g < groups; ++g) {
    __m512 sums[2][T];
    clear(sums);
    for (std::int64_t k = g * m.group; k < (g + 1) * m.group; k += 4, data += 64) {
      __m512i w[2];
      prefetch(data, ahead);
      decoder.decode(data, w);
      each<T>([&](auto t) TANDEM_INLINED {
        const std::uint16_t* at = x.bf16 + t * x.stride + k;
        sums[0][t] = multiply_add_bf16(sums[0][t], w[0], broadcast4(at));
        sums[1][t] = multiply_add_bf16(sums[1][t], w[1], broadcast4(at + 2));
      });
    }
    const __m512 scale = load_scales<Format::kFp8>(m, block, block * groups + g);
    each<T>([&](auto t) TANDEM_INLINED {
      total[t] = _mm512_fmadd_ps(_mm512_add_ps(sums[0][t], sums[1][t]), scale, total[t]);
    });
  }
  each<T>([&](auto t) TANDEM_INLINED { out.store(t, total[t]); });
}

// A register of 16 halves holds two columns of eight rows. Its lanes are even and odd columns,
// which are added at the end.
template <int T>
void few_fp16(const PackedMatrix& m, std::int64_t block, const Activations& x, std::int64_t ahead,
              const Output& out) {
  const std::uint8_t* data = m.data + block * m.cols * kBlockRows * 2;
  __m512 sums[2][T];
  clear(sums);
  for (std::int64_t k = 0; k < m.cols; k += 2, data += 64) {
    prefetch(data, ahead);
    const __m512i w = _mm512_loadu_si512(data);
    const __m512 top = _mm512_cvtph_ps(_mm512_castsi512_si256(w));
    const __m512 bottom = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(w, 1));
    each<T>([&](auto t) TANDEM_INLINED {
      double two;
      std::memcpy(&two, x.fp32 + t * x.stride + k, sizeof two);
      const __m512 pair = _mm512_castpd_ps(_mm512_set1_pd(two));
      sums[0][t] = _mm512_fmadd_ps(top, pair, sums[0][t]);
      sums[1][t] = _mm512_fmadd_ps(bottom, pair, sums[1][t]);
    });
  }
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  each<T>([&](auto t) TANDEM_INLINED {
    out.store(t, _mm512_add_ps(_mm512_permutex2var_ps(sums[0][t], even, sums[1][t]),
                               _mm512_permutex2var_ps(sums[0][t], odd, sums[1][t])));
  });
}

template <Format F, int T>
void few_tokens(const PackedMatrix& m, std::int64_t block, const Activations& x, std::int64_t ahead,
                const Output& out) {
  if constexpr (F == Format::kBf16) return few_bf16<T>(m, block, x, ahead, out);
  if constexpr (F == Format::kFp8) return few_fp8<T>(m, block, x, ahead, out);
  if constexpr (F == Format::kFp16) return few_fp16<T>(m, block, x, ahead, out);
}

constexpr std::int64_t kFewTokens = 8;
// Up to so many tokens, reading and decoding weights twice takes less time than keeping decoded ones in a panel:
// with 9 to 16 tokens 1.1 to 1.3 less (Sapphire Rapids); not with minima, nor for floats.
template <Format F>
constexpr std::int64_t kMostFewByFew = (is_integer(F) && !kHasMinima<F> ? 2 : 1) * kFewTokens;

// Multiplies up to two row blocks by up to `kFewTokens` tokens.
template <Format F>
void few_at_once(const PackedMatrix& m, FewBlocks blocks, const Activations& x,
                 std::int64_t num_tokens, std::int64_t ahead, const Output (&out)[2]) {
  if constexpr (!is_integer(F)) {
    each<kFewTokens>([&](auto i) TANDEM_INLINED {
      constexpr int T = decltype(i)::value + 1;
      if (num_tokens != T) return;
      few_tokens<F, T>(m, blocks.first, x, ahead, out[0]);
      if (blocks.second > 0) few_tokens<F, T>(m, blocks.first + 1, x, ahead, out[1]);
    });
  } else if (kHasMinima<F> && num_tokens == 1) {
    few_integer<F, 1, 1>(m, {blocks.first, 0}, x, 1, ahead, out);
    if (blocks.second > 0) few_integer<F, 1, 1>(m, {blocks.first + 1, 0}, x, 1, ahead, out + 1);
  } else {
    each<6>([&](auto i) TANDEM_INLINED {
      constexpr int kMost[] = {0, 1, 2, 3, 4, 6, kFewTokens}, I = decltype(i)::value;
      constexpr int T = kMost[I + 1];
      if (num_tokens > kMost[I] && num_tokens <= T)
        few_integer<F, T, 2>(m, blocks, x, num_tokens, ahead, out);
    });
  }
}

inline Activations from_token(Activations x, std::int64_t token) {
  if (x.quantized != nullptr) {
    x.quantized += token * x.stride;
    x.scales += token * x.group_stride;
    x.sums += token * x.group_stride;
  }
  if (x.bf16 != nullptr) x.bf16 += token * x.stride;
  if (x.fp32 != nullptr) x.fp32 += token * x.stride;
  return x;
}

// Multiplies any number of tokens, at most `kFewTokens` at a time. The first of them load the blocks
// into the cache, the second ones prefetch the next blocks.
template <Format F>
void few_by_few(const PackedMatrix& m, FewBlocks blocks, bool is_last, const Activations& x,
                std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  const std::int64_t block_bytes = code_bytes(F, m.cols);
  const std::int64_t times = (num_tokens + kFewTokens - 1) / kFewTokens;
  for (std::int64_t i = 0; i < times; ++i) {
    const std::int64_t t = i * num_tokens / times, count = (i + 1) * num_tokens / times - t;
    const std::int64_t ahead = i == 0               ? kAheadBytes
                               : i == 1 && !is_last ? (1 + blocks.second) * block_bytes
                                                    : 0;
    float* to = out + t * stride;
    few_at_once<F>(m, blocks, from_token(x, t), count, ahead,
                   {Output::of(m, blocks.first, num_rows, to, stride),
                    Output::of(m, blocks.first + blocks.second, num_rows, to, stride)});
  }
}

}  // namespace
}  // namespace tandem
