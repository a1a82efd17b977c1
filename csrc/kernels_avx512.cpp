// AVX-512 with VNNI, BF16 and VBMI (Zen 4, Ice Lake with BF16, Sapphire Rapids onwards).
//
// A register holds one column (four for int8, two for bf16) of a block's 16 rows, so a weight is
// loaded once and multiplied by a broadcast activation per token. There is no sum across lanes, and
// one stream of memory per thread. The code for few and for many tokens is in avx512/.
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "avx2/half_rows.hpp"
#include "avx512/few_tokens.hpp"
#include "avx512/grids.hpp"
#include "avx512/many_tokens.hpp"
#include "kernels.hpp"

namespace tandem {
namespace {

// Calls with<Group>() for the number of columns that share a scale; returns false if no tile is
// compiled for it.
template <Format F, typename With>
bool with_group(std::int64_t group, const With& with) {
  constexpr int kOwn = static_cast<int>(encoding(F).group);
  if constexpr (!is_integer(F) || kOwn > 0) {
    with.template operator()<is_integer(F) ? kOwn : 128>();
    return true;
  } else {
    if (group == 32) with.template operator()<32>();
    if (group == 128) with.template operator()<128>();
    return group == 32 || group == 128;
  }
}

template <Format F>
void matmul_format(const PackedMatrix& m, std::int64_t begin, std::int64_t end,
                   const Activations& x, std::int64_t num_tokens, std::int64_t num_rows, float* out,
                   std::int64_t stride) {
  end = std::min(end, (num_rows + kBlockRows - 1) / kBlockRows);
  const bool is_done = num_tokens > kMostFewByFew<F> && with_group<F>(m.group, [&]<int Group>() {
                         many_tokens<F, Group>(m, begin, end, x, num_tokens, num_rows, out, stride);
                       });
  if (is_done) return;
  for (std::int64_t b = begin; b < end; b += 2)
    few_by_few<F>(m, {b, b + 1 < end ? 1 : 0}, b + 2 >= end, x, num_tokens, num_rows, out, stride);
}

void matmul(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
            std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  if (is_grid(m.format) && num_tokens == 1)
    return multiply_one_token(m, begin, end, x, num_rows, out);
  if (is_grid(m.format))
    return multiply_grid({look_up_block<Lookup512>, matmul}, m, begin, end, x, num_tokens, num_rows,
                         out, stride);
  if (!has_vector_kernels(m.format))
    return portable_kernels().matmul(m, begin, end, x, num_tokens, num_rows, out, stride);
  each<kNumEncodings>([&](auto number) {
    constexpr Format F = static_cast<Format>(decltype(number)::value);
    if constexpr (has_vector_kernels(F))
      if (m.format == F) matmul_format<F>(m, begin, end, x, num_tokens, num_rows, out, stride);
  });
}

void quantize(const float* row, std::int64_t cols, std::int64_t group, Format format,
              std::int8_t* quantized, float* scales, std::int32_t* sums) {
  for (std::int64_t g = 0; g < cols / group; ++g) {
    const float* x = row + g * group;
    __m512 largest = _mm512_setzero_ps();
    __mmask16 nans = 0;  // the maximum would lose NaN, but it must be in the result
    for (std::int64_t k = 0; k < group; k += 16) {
      const __m512 values = _mm512_loadu_ps(x + k);
      nans |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
      largest = _mm512_max_ps(largest, _mm512_abs_ps(values));
    }
    const float top = nans ? NAN : _mm512_reduce_max_ps(largest);
    const __m512 inverse = _mm512_set1_ps(top >= kSmallestPeak ? 127.0f / top : 0);
    __m512i sum = _mm512_setzero_si512();
    for (std::int64_t k = 0; k < group; k += 16) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), inverse));
      const __m128i bytes = _mm512_cvtepi32_epi8(q);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(quantized + g * group + k),
                       is_grid(format) ? in_grid_order(bytes) : bytes);
      sum = _mm512_add_epi32(sum, q);
    }
    scales[g] = top / 127.0f;
    sums[g] = stored_sum(format, _mm512_reduce_add_epi32(sum), scales[g]);
  }
}

void to_bf16(const float* row, std::int64_t cols, std::uint16_t* out) {
  for (std::int64_t k = 0; k < cols; k += 8)  // `cols` is a multiple of 8
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k),
                     reinterpret_cast<__m128i>(_mm256_cvtneps_pbh(_mm256_loadu_ps(row + k))));
}

// exp(x) to about 1e-7 relative: 2^n times a polynomial on [-ln2/2, ln2/2] (Taylor to x^6).
__m512 exp_ps(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-88.0f), _mm512_min_ps(_mm512_set1_ps(88.0f), x));  // keeps NaN
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

// cap * tanh(x / cap). Near zero it uses the series, because 2 * sigmoid(2 x) - 1 loses digits
// there.
__m512 softcapped(__m512 x, float cap) {
  const __m512 one = _mm512_set1_ps(1.0f);
  x = _mm512_div_ps(x, _mm512_set1_ps(cap));
  const __m512 square = _mm512_mul_ps(x, x);
  const __m512 two = _mm512_set1_ps(2.0f);
  const __m512 far = _mm512_sub_ps(_mm512_mul_ps(two, sigmoid(_mm512_mul_ps(two, x))), one);
  const __m512 rest = _mm512_fmadd_ps(square, _mm512_set1_ps(2.0f / 15), _mm512_set1_ps(-1.0f / 3));
  const __m512 near = _mm512_mul_ps(x, _mm512_fmadd_ps(square, rest, one));
  const __mmask16 is_near = _mm512_cmp_ps_mask(square, _mm512_set1_ps(0.01f), _CMP_LT_OQ);
  return _mm512_mul_ps(_mm512_mask_blend_ps(is_near, far, near), _mm512_set1_ps(cap));
}

// Minimum and maximum return their second operand if one is NaN, so the value comes second.
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
    case Activation::kSoftcapped: {
      const __m512 g = _mm512_mul_ps(softcapped(gate, spec.alpha), sigmoid(gate));
      return _mm512_mul_ps(g, softcapped(up, spec.limit));
    }
    case Activation::kSwiglu: {
      const __m512 limit = _mm512_set1_ps(spec.limit);
      const __m512 g = _mm512_min_ps(limit, gate);
      const __m512 u = _mm512_max_ps(_mm512_set1_ps(-spec.limit), _mm512_min_ps(limit, up));
      const __m512 s = sigmoid(_mm512_mul_ps(_mm512_set1_ps(spec.alpha), g));
      return _mm512_mul_ps(_mm512_mul_ps(g, s), _mm512_add_ps(u, _mm512_set1_ps(spec.offset)));
    }
    case Activation::kLimitedSilu: {
      const __m512 limit = _mm512_set1_ps(spec.limit);
      const __m512 g = _mm512_min_ps(limit, _mm512_mul_ps(gate, sigmoid(gate)));
      const __m512 u = _mm512_max_ps(_mm512_set1_ps(-spec.limit), _mm512_min_ps(limit, up));
      return _mm512_mul_ps(g, u);
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

// The empty statement keeps the loop, because the compiler must assume that the registers are read.
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
  static const Kernels kernels{"avx512",      quantize,      to_bf16,      from_fp16,
                               to_fp16,       matmul,        activate,     read,
                               multiply_int8, multiply_int8, multiply_bf16};
  return kernels;
}

}  // namespace tandem
