// AVX-512 with VNNI and BF16 (Zen 4, Ice Lake and Sapphire Rapids onwards).
//
// A register holds one column (four int8, two bf16) of a block's 16 rows, so a weight is loaded
// once and multiplied with a broadcast activation per token: no sum across lanes, one stream of
// memory per thread.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.hpp"

namespace tandem {
namespace {

constexpr int kMaxTile = 8;  // tokens that share a loaded weight; 16 int32 + 8 fp32 accumulators

__m512i broadcast4(const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof four);
  return _mm512_set1_epi32(four);
}

// Four bits to the unsigned code that the multiplier takes.
template <Format F>
__m512i decode(__m512i nibbles) {
  if constexpr (F != Format::kMxfp4) return nibbles;
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
}

template <Format F>
__m512 load_scales(const std::uint8_t* scales, std::int64_t index) {
  if constexpr (F == Format::kMxfp4) {
    // 2^(e - 127) is the float with exponent e; one less, since the codes are doubled. e = 0 would
    // need a subnormal: 2^-128 of nothing is as good as nothing.
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + index * 16));
    const __m512i e = _mm512_cvtepu8_epi32(bytes);
    const __m512i halved = _mm512_max_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)),
                                            _mm512_setzero_si512());
    return _mm512_castsi512_ps(_mm512_slli_epi32(halved, 23));
  } else {
    constexpr std::int64_t kBytes = F == Format::kInt4Zero ? 64 : 32;
    const auto* at = reinterpret_cast<const __m256i*>(scales + index * kBytes);
    return _mm512_cvtph_ps(_mm256_loadu_si256(at));
  }
}

__m512 load_minima(const std::uint8_t* scales, std::int64_t index) {
  const auto* at = reinterpret_cast<const __m256i*>(scales + index * 64 + 32);
  return _mm512_cvtph_ps(_mm256_loadu_si256(at));
}

// The hardware follows a stream only to the end of a page. 1 to 6 KB ahead made int4 with one token a
// third faster (Sapphire Rapids, 2 threads); with many tokens the weights come from the cache.
constexpr std::int64_t kAheadBytes = 4096;

template <int T>
void prefetch(const std::uint8_t* data) {
  if constexpr (T <= 4)
    _mm_prefetch(reinterpret_cast<const char*>(data + kAheadBytes), _MM_HINT_T0);
}

// Few tokens need two sums each to hide the multiplier's latency; eight hide it by themselves.
template <int T>
constexpr bool kIsShort = T < 8;

// Adds one group's products to low[t], every second one to high[t] where there is one.
template <Format F, int T>
const std::uint8_t* multiply_group(const std::uint8_t* data, std::int64_t group,
                                   const std::int8_t* q, std::int64_t stride, __m512i* low,
                                   __m512i* high) {
  if constexpr (F == Format::kInt8) {
    for (std::int64_t k = 0; k < group; k += 8, data += 128) {
      prefetch<T>(data);
      prefetch<T>(data + 64);
      const __m512i w0 = _mm512_loadu_si512(data);
      const __m512i w1 = _mm512_loadu_si512(data + 64);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        low[t] = _mm512_dpbusd_epi32(low[t], w0, broadcast4(q + t * stride + k));
        __m512i& second = kIsShort<T> ? high[t] : low[t];
        second = _mm512_dpbusd_epi32(second, w1, broadcast4(q + t * stride + k + 4));
      }
    }
  } else {
    const __m512i mask = _mm512_set1_epi8(15);
    for (std::int64_t k = 0; k < group; k += 8, data += 64) {
      prefetch<T>(data);
      const __m512i w = _mm512_loadu_si512(data);
      const __m512i w0 = decode<F>(_mm512_and_si512(w, mask));
      const __m512i w1 = decode<F>(_mm512_and_si512(_mm512_srli_epi16(w, 4), mask));
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        low[t] = _mm512_dpbusd_epi32(low[t], w0, broadcast4(q + t * stride + k));
        __m512i& second = kIsShort<T> ? high[t] : low[t];
        second = _mm512_dpbusd_epi32(second, w1, broadcast4(q + t * stride + k + 4));
      }
    }
  }
  return data;
}

struct Output {
  float* at;
  std::int64_t stride;
  __mmask16 rows;
  __m512 bias;
};

template <int T>
void store(const Output& out, const __m512* total) {
  for (int t = 0; t < T; ++t)
    _mm512_mask_storeu_ps(out.at + t * out.stride, out.rows, _mm512_add_ps(total[t], out.bias));
}

// One block of 16 rows times T tokens.
template <Format F, int T>
void integer_tile(const PackedMatrix& m, std::int64_t block, const Activations& x, std::int64_t token,
                  const Output& out) {
  constexpr std::int64_t kBits = F == Format::kInt8 ? 8 : 4;
  const std::int64_t groups = m.cols / m.group;
  const std::uint8_t* data = m.data + block * m.cols * kBlockRows * kBits / 8;
  const std::int8_t* q = x.quantized + token * x.stride;
  const float* x_scales = x.scales + token * x.group_stride;
  const std::int32_t* x_sums = x.sums + token * x.group_stride;
  __m512 total[T];
  for (int t = 0; t < T; ++t) total[t] = _mm512_setzero_ps();
  for (std::int64_t g = 0; g < groups; ++g) {
    __m512i low[T];
    __m512i high[T];
    for (int t = 0; t < T; ++t) {
      const bool starts_at_offset = F != Format::kInt4Zero;
      low[t] = starts_at_offset ? _mm512_set1_epi32(x_sums[t * x.group_stride + g])
                                : _mm512_setzero_si512();
      if constexpr (kIsShort<T>) high[t] = _mm512_setzero_si512();
    }
    data = multiply_group<F, T>(data, m.group, q + g * m.group, x.stride, low, high);
    const std::int64_t index = block * groups + g;
    const __m512 w_scale = load_scales<F>(m.scales, index);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m512 scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(x_scales[t * x.group_stride + g]));
      const __m512i products = kIsShort<T> ? _mm512_add_epi32(low[t], high[t]) : low[t];
      const __m512 sum = _mm512_cvtepi32_ps(products);
      total[t] = _mm512_fmadd_ps(sum, scale, total[t]);
      if constexpr (F == Format::kInt4Zero) {
        const float weight = x_scales[t * x.group_stride + g] *
                             static_cast<float>(x_sums[t * x.group_stride + g]);
        total[t] = _mm512_fmadd_ps(load_minima(m.scales, index), _mm512_set1_ps(weight), total[t]);
      }
    }
  }
  store<T>(out, total);
}

__m512bh broadcast2(const std::uint16_t* x) {
  std::int32_t two;
  std::memcpy(&two, x, sizeof two);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
}

template <int T>
void bf16_tile(const PackedMatrix& m, std::int64_t block, const Activations& x, std::int64_t token,
               const Output& out) {
  const auto* data = m.data + block * m.cols * kBlockRows * 2;
  const std::uint16_t* row = x.bf16 + token * x.stride;
  constexpr int kChains = T >= 4 ? 2 : 4;  // independent sums per token, to hide latency
  __m512 sum[T][kChains];
  for (auto& chains : sum)
    for (__m512& s : chains) s = _mm512_setzero_ps();
  for (std::int64_t k = 0; k < m.cols; k += 8, data += 256) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      prefetch<T>(data + 64 * c);
      const __m512bh w = reinterpret_cast<__m512bh>(_mm512_loadu_si512(data + 64 * c));
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        __m512& s = sum[t][c % kChains];
        s = _mm512_dpbf16_ps(s, w, broadcast2(row + t * x.stride + k + 2 * c));
      }
    }
  }
  __m512 total[T];
  for (int t = 0; t < T; ++t) {
    total[t] = _mm512_add_ps(sum[t][0], sum[t][1]);
    for (int c = 2; c < kChains; ++c) total[t] = _mm512_add_ps(total[t], sum[t][c]);
  }
  store<T>(out, total);
}

template <Format F, int T>
void tile(const PackedMatrix& m, std::int64_t block, const Activations& x, std::int64_t token,
          const Output& out) {
  if constexpr (F == Format::kBf16) {
    bf16_tile<T>(m, block, x, token, out);
  } else {
    integer_tile<F, T>(m, block, x, token, out);
  }
}

template <Format F>
void matmul_format(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
                   std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  for (std::int64_t b = begin; b < end; ++b) {
    const std::int64_t valid = std::min(kBlockRows, num_rows - b * kBlockRows);
    if (valid <= 0) return;
    Output to{out + b * kBlockRows, stride, static_cast<__mmask16>((1u << valid) - 1),
              m.bias ? _mm512_loadu_ps(m.bias + b * kBlockRows) : _mm512_setzero_ps()};
    for (std::int64_t t = 0; t < num_tokens;) {
      const std::int64_t left = num_tokens - t;
      std::int64_t done = 1;
      if (left >= kMaxTile) {
        tile<F, kMaxTile>(m, b, x, t, to);
        done = kMaxTile;
      } else if (left >= 4) {
        tile<F, 4>(m, b, x, t, to);
        done = 4;
      } else if (left >= 2) {
        tile<F, 2>(m, b, x, t, to);
        done = 2;
      } else {
        tile<F, 1>(m, b, x, t, to);
      }
      t += done;
      to.at += done * stride;
    }
  }
}

void matmul(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
            std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  switch (m.format) {
    case Format::kBf16: return matmul_format<Format::kBf16>(m, begin, end, x, num_tokens, num_rows, out, stride);
    case Format::kInt8: return matmul_format<Format::kInt8>(m, begin, end, x, num_tokens, num_rows, out, stride);
    case Format::kInt4: return matmul_format<Format::kInt4>(m, begin, end, x, num_tokens, num_rows, out, stride);
    case Format::kInt4Zero: return matmul_format<Format::kInt4Zero>(m, begin, end, x, num_tokens, num_rows, out, stride);
    case Format::kMxfp4: return matmul_format<Format::kMxfp4>(m, begin, end, x, num_tokens, num_rows, out, stride);
    default: return avx2_kernels().matmul(m, begin, end, x, num_tokens, num_rows, out, stride);
  }
}

void quantize(const float* row, std::int64_t cols, std::int64_t group, std::int32_t sum_factor,
              std::int8_t* quantized, float* scales, std::int32_t* sums) {
  for (std::int64_t g = 0; g < cols / group; ++g) {
    const float* x = row + g * group;
    __m512 largest = _mm512_setzero_ps();
    __mmask16 nans = 0;  // the maximum would lose them; they must come out as NaN
    for (std::int64_t k = 0; k < group; k += 16) {
      const __m512 values = _mm512_loadu_ps(x + k);
      nans |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
      largest = _mm512_max_ps(largest, _mm512_abs_ps(values));
    }
    const float top = nans ? NAN : _mm512_reduce_max_ps(largest);
    const __m512 inverse = _mm512_set1_ps(top > 0 ? 127.0f / top : 0);
    __m512i sum = _mm512_setzero_si512();
    for (std::int64_t k = 0; k < group; k += 16) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(quantized + g * group + k), _mm512_cvtepi32_epi8(q));
      sum = _mm512_add_epi32(sum, q);
    }
    scales[g] = top / 127.0f;
    sums[g] = sum_factor * _mm512_reduce_add_epi32(sum);
  }
}

void to_bf16(const float* row, std::int64_t cols, std::uint16_t* out) {
  for (std::int64_t k = 0; k < cols; k += 8)  // `cols` is a multiple of 8
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k),
                     reinterpret_cast<__m128i>(_mm256_cvtneps_pbh(_mm256_loadu_ps(row + k))));
}

// exp(x) to about 1e-7 relative: 2^n times a polynomial on [-ln2/2, ln2/2] (Taylor to x^6).
__m512 exp_ps(__m512 x) {
  x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-88.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

__m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// Minimum and maximum return their second operand if one is NaN: the value comes second.
__m512 activated(const ActivationSpec& spec, __m512 gate, __m512 up) {
  switch (spec.kind) {
    case Activation::kGeluTanhGate: {
      const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(gate, gate), gate);
      const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), gate);
      const __m512 s = sigmoid(_mm512_mul_ps(inner, _mm512_set1_ps(2 * 0.7978845608f)));
      return _mm512_mul_ps(_mm512_mul_ps(gate, s), up);
    }
    case Activation::kRelu2: {
      const __m512 positive = _mm512_max_ps(_mm512_setzero_ps(), gate);
      return _mm512_mul_ps(positive, positive);
    }
    case Activation::kSwiglu: {
      const __m512 limit = _mm512_set1_ps(spec.limit);
      const __m512 g = _mm512_min_ps(limit, gate);
      const __m512 u = _mm512_max_ps(_mm512_set1_ps(-spec.limit), _mm512_min_ps(limit, up));
      const __m512 s = sigmoid(_mm512_mul_ps(_mm512_set1_ps(spec.alpha), g));
      return _mm512_mul_ps(_mm512_mul_ps(g, s), _mm512_add_ps(u, _mm512_set1_ps(spec.offset)));
    }
  }
  return gate;
}

void activate(const ActivationSpec& spec, const float* row, std::int64_t cols, float* inner) {
  const bool is_gated = spec.kind != Activation::kRelu2;
  for (std::int64_t k = 0; k < cols; k += 16) {  // `cols` is a multiple of 16
    const float* at = row + (is_gated ? 2 * k : k);
    const __m512 up = is_gated ? _mm512_loadu_ps(at + 16) : _mm512_setzero_ps();
    _mm512_storeu_ps(inner + k, activated(spec, _mm512_loadu_ps(at), up));
  }
}

std::uint64_t read(const std::uint8_t* data, std::int64_t bytes) {
  __m512i sums[4] = {};
  for (std::int64_t i = 0; i + 256 <= bytes; i += 256)
    for (int c = 0; c < 4; ++c)
      sums[c] = _mm512_add_epi64(sums[c], _mm512_loadu_si512(data + i + 64 * c));
  const __m512i sum = _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]),
                                       _mm512_add_epi64(sums[2], sums[3]));
  return static_cast<std::uint64_t>(_mm512_reduce_add_epi64(sum));
}

// The empty statement keeps the loop: the compiler must believe that the registers are looked at.
std::int64_t multiply_int8(std::int64_t count) {
  __m512i sums[8] = {};
  const __m512i one = _mm512_set1_epi8(1);
  for (std::int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 8
    for (__m512i& sum : sums) {
      sum = _mm512_dpbusd_epi32(sum, one, one);
      __asm__ volatile("" : "+v"(sum));
    }
  }
  return count * 8 * 64 * 2;
}

std::int64_t multiply_bf16(std::int64_t count) {
  __m512 sums[8] = {};
  const __m512bh one = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3F803F80));
  for (std::int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 8
    for (__m512& sum : sums) {
      sum = _mm512_dpbf16_ps(sum, one, one);
      __asm__ volatile("" : "+v"(sum));
    }
  }
  return count * 8 * 32 * 2;
}

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels kernels{"avx512", quantize, to_bf16,       matmul,
                               activate, read,     multiply_int8, multiply_bf16};
  return kernels;
}

}  // namespace tandem
