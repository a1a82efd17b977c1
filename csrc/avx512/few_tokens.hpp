// Few tokens: the weights stream through the registers once, one row block after the other, and
// are multiplied as they come. Bound by memory with one token, by arithmetic from about four.
#pragma once

#include <algorithm>

#include "weights.hpp"

namespace tandem {
namespace {

// The hardware follows a stream only to the end of a page. 1 to 6 KB ahead made int4 with one token
// a third faster (Sapphire Rapids, 2 threads).
constexpr std::int64_t kAheadBytes = 4096;

TANDEM_INLINE void prefetch(const std::uint8_t* data, std::int64_t ahead) {
  _mm_prefetch(reinterpret_cast<const char*>(data + ahead), _MM_HINT_T0);
}

// A group's scales are read once, in a stream too slow for the hardware to follow: without this
// they cost a third of the time with eight tokens. `groups` ahead is the same place of the next
// block.
template <Format F>
TANDEM_INLINE void prefetch_scales(const PackedMatrix& m, std::int64_t block, std::int64_t index,
                                   std::int64_t groups) {
  const std::uint8_t* next = scales_at<F>(m, block + 1, index + groups);
  _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
}

// Few tokens need two sums each to hide the multiplier's latency; from five on they hide it.
template <int T>
constexpr int kIntegerChains = T < 5 ? 2 : 1;

// Fours of columns that lie in the same lines, those of the widest plane of bits.
template <Format F>
constexpr int kFoursOfLine = kBits<F> & 8 ? 1 : kBits<F> & 4 ? 2 : kBits<F> & 2 ? 4 : 8;

// Adds group `Part` of a strip, or all of it.
template <Format F, int Part, int T>
TANDEM_INLINE void multiply_strip(const std::uint8_t* strip, std::int64_t ahead,
                                  const std::int8_t* q, std::int64_t stride,
                                  __m512i (&sums)[kIntegerChains<T>][T]) {
  constexpr int kCount = kFoursOfStrip / kGroupsOfStrip<F>;
  each<kCount>([&](auto i) TANDEM_INLINED {
    constexpr int J = Part * kCount + decltype(i)::value;
    constexpr int kChain = J % kIntegerChains<T>;
    // Lines are asked for one by one: all at once they wait for each other. The barrier keeps the
    // compiler from gathering them, and what one line is read for stays together.
    if constexpr (J % kFoursOfLine<F> == 0) asm volatile("" ::: "memory");
    constexpr int kLines = kStripBytes<F> / 64, kLine = J * kLines / kFoursOfStrip;
    each<(J + 1) * kLines / kFoursOfStrip - kLine>(
        [&](auto line) TANDEM_INLINED { prefetch(strip + 64 * (kLine + line), ahead); });
    const __m512i w = codes_of<Bytes64, F, J>(strip);
    each<T>([&](auto t) TANDEM_INLINED {
      sums[kChain][t] = multiply_add_int8(sums[kChain][t], w, broadcast4(q + t * stride + 4 * J));
    });
  });
}

// Adds the products of one group; `g` is its number in a row, and `Part` that in its strip.
template <Format F, int Part, int T>
TANDEM_INLINE void few_of_group(const PackedMatrix& m, std::int64_t block, std::int64_t g,
                                const std::uint8_t* strips, const Activations& x,
                                std::int64_t ahead, __m512 (&total)[T]) {
  const std::int64_t groups = m.cols / m.group;
  const std::int32_t* x_sums = x.sums + g;
  __m512i sums[kIntegerChains<T>][T];
  each<T>([&](auto t) TANDEM_INLINED {
    sums[kIntegerChains<T> - 1][t] = _mm512_setzero_si512();
    sums[0][t] = kHasMinima<F> ? _mm512_setzero_si512()
                               : _mm512_set1_epi32(x_sums[t * x.group_stride]);
  });
  const std::int8_t* q = x.quantized + g / kGroupsOfStrip<F> * kGroupsOfStrip<F> * m.group;
  for (std::int64_t k = 0; k < m.group; k += kStripCols)
    multiply_strip<F, Part, T>(strips + code_bytes(F, k), ahead, q + k, x.stride, sums);
  const std::int64_t index = block * groups + g;
  prefetch_scales<F>(m, block, index, groups);
  const __m512 w_scale = load_scales<F>(m, block, index);
  [[maybe_unused]] __m512 minima;
  if constexpr (kHasMinima<F>) minima = load_minima<F>(m, block, index);
  each<T>([&](auto t) TANDEM_INLINED {
    const float x_scale = x.scales[t * x.group_stride + g];
    __m512i sum = sums[0][t];
    if constexpr (kIntegerChains<T> == 2) sum = _mm512_add_epi32(sum, sums[1][t]);
    total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum),
                               _mm512_mul_ps(w_scale, _mm512_set1_ps(x_scale)), total[t]);
    if constexpr (kHasMinima<F>) {
      const __m512 x_sum = _mm512_set1_ps(x.scaled_sum(t * x.group_stride + g));
      total[t] = _mm512_fmadd_ps(minima, x_sum, total[t]);
    }
  });
}

template <Format F, int T>
void few_integer(const PackedMatrix& m, std::int64_t block, const Activations& x,
                 std::int64_t ahead, const Output& out) {
  constexpr int kParts = kGroupsOfStrip<F>;
  const std::int64_t groups = m.cols / m.group;
  const std::uint8_t* strips = m.data + block * code_bytes(F, m.cols);
  __m512 total[T];
  each<T>([&](auto t) TANDEM_INLINED { total[t] = _mm512_setzero_ps(); });
  for (std::int64_t g = 0; g < groups; g += kParts, strips += code_bytes(F, kParts * m.group))
    each<kParts>([&](auto part) TANDEM_INLINED {
      few_of_group<F, decltype(part)::value, T>(m, block, g + part, strips, x, ahead, total);
    });
  each<T>([&](auto t) TANDEM_INLINED { out.store(t, total[t]); });
}

template <int T>
TANDEM_INLINE void clear(__m512 (&sums)[2][T]) {
  each<T>([&](auto t) TANDEM_INLINED { sums[0][t] = sums[1][t] = _mm512_setzero_ps(); });
}

// Even and odd pairs of columns are summed apart, as many tokens do, so that a result does not
// depend on how many tokens there are.
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

// A register of 16 halves holds two columns of eight rows: lanes of even and of odd columns, which
// are added at the end.
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
  if constexpr (is_integer(F)) return few_integer<F, T>(m, block, x, ahead, out);
}

constexpr std::int64_t kFewTokens = 8;

template <Format F>
void few_at_once(const PackedMatrix& m, std::int64_t block, const Activations& x,
                 std::int64_t num_tokens, std::int64_t ahead, const Output& out) {
  switch (num_tokens) {
    case 1: return few_tokens<F, 1>(m, block, x, ahead, out);
    case 2: return few_tokens<F, 2>(m, block, x, ahead, out);
    case 3: return few_tokens<F, 3>(m, block, x, ahead, out);
    case 4: return few_tokens<F, 4>(m, block, x, ahead, out);
    case 5: return few_tokens<F, 5>(m, block, x, ahead, out);
    case 6: return few_tokens<F, 6>(m, block, x, ahead, out);
    case 7: return few_tokens<F, 7>(m, block, x, ahead, out);
    case 8: return few_tokens<F, 8>(m, block, x, ahead, out);
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

// Any number of tokens, `kFewTokens` at a time. The first ones bring a block into the cache, the
// second ones fetch the next block.
template <Format F>
void few_by_few(const PackedMatrix& m, std::int64_t block, bool is_last, const Activations& x,
                std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  const std::int64_t block_bytes = code_bytes(F, m.cols);
  for (std::int64_t t = 0; t < num_tokens; t += kFewTokens) {
    const std::int64_t ahead = t == 0                        ? kAheadBytes
                               : t == kFewTokens && !is_last ? block_bytes
                                                             : 0;
    few_at_once<F>(m, block, from_token(x, t), std::min(kFewTokens, num_tokens - t), ahead,
                   Output::of(m, block, num_rows, out + t * stride, stride));
  }
}

}  // namespace
}  // namespace tandem
