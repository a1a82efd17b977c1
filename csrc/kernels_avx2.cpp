// AVX2 with FMA and F16C: Haswell and Zen onwards, which is nearly every PC of the last ten years.
//
// Two registers hold one column (four for int8, one for fp32) of a block's 16 rows, so a weight is
// loaded once and multiplied by a broadcast activation per token. There is no sum across lanes, and
// one stream of memory per thread. From five tokens on, a block's weights are decoded once into a
// small panel.
#include <immintrin.h>

#include <cmath>
#include <initializer_list>

#include "avx2/float.hpp"
#include "avx2/grids.hpp"
#include "avx2/half_rows.hpp"
#include "avx2/integer.hpp"

namespace tandem {
namespace {

struct Maddubs {
  static constexpr bool kIs16Bit = true;

  static __m256i add(__m256i part, __m256i codes, __m256i x) {
    part = _mm256_add_epi16(part, _mm256_maddubs_epi16(codes, x));
    // Without the barrier GCC computes all products first and then adds them in a tree through
    // memory, at half the speed.
    __asm__("" : "+x"(part));
    return part;
  }
  static __m256i flush(__m256i sum, __m256i part) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
  }
};

void matmul(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
            std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  const Product product{m, x, num_rows, out, stride};
  if (is_grid(m.format) && num_tokens == 1) return multiply_one_token(product, begin, end);
  if (is_grid(m.format))
    return multiply_grid({look_up_avx2, matmul}, m, begin, end, x, num_tokens, num_rows, out,
                         stride);
  if (multiply_integers<Maddubs>(product, begin, end, num_tokens)) return;
  multiply_floats(product, begin, end, num_tokens);
}

std::int32_t largest_of(__m256i values) {
  alignas(32) std::int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), values);
  std::int32_t largest = lanes[0];
  for (const std::int32_t lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

std::int32_t sum_of(__m256i values) {
  alignas(32) std::int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), values);
  std::int32_t sum = 0;
  for (const std::int32_t lane : lanes) sum += lane;
  return sum;
}

// Rounds 16 numbers to int8 and adds them to `sum`.
void quantize16(const float* x, __m256 kept, __m256 inverse, std::int8_t* out, __m256i& sum) {
  __m256i q[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 values = _mm256_and_ps(_mm256_loadu_ps(x + 8 * i), kept);
    q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values, inverse));
    sum = _mm256_add_epi32(sum, q[i]);
  }
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_packs_epi16(_mm256_castsi256_si128(words),
                                   _mm256_extracti128_si256(words, 1)));
}

// Rounds 32 numbers to int8 and adds them to `sum`.
void quantize32(const float* x, __m256 kept, __m256 inverse, std::int8_t* out, __m256i& sum) {
  __m256i q[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 values = _mm256_and_ps(_mm256_loadu_ps(x + 8 * i), kept);
    q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values, inverse));
    sum = _mm256_add_epi32(sum, q[i]);
  }
  const __m256i bytes =
      _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permutevar8x32_epi32(bytes, order));
}

void quantize(const float* row, std::int64_t cols, std::int64_t group, Format format,
              std::int8_t* quantized, float* scales, std::int32_t* sums) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  for (std::int64_t g = 0; g < cols / group; ++g) {
    const float* x = row + g * group;
    __m256i largest = _mm256_setzero_si256();
    for (std::int64_t k = 0; k < group; k += 8) {  // compared as integers, NaN is the greatest
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + k));
      largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude));
    }
    const std::int32_t top_bits = largest_of(largest);
    const bool is_finite = top_bits < 0x7F800000;
    float top;
    std::memcpy(&top, &top_bits, sizeof top);
    const bool is_rounded = is_finite && top >= kSmallestPeak;  // otherwise all become zeros
    const __m256 kept = _mm256_castsi256_ps(_mm256_set1_epi32(is_rounded ? -1 : 0));
    const __m256 inverse = _mm256_set1_ps(is_rounded ? 127.0f / top : 0.0f);
    __m256i sum = _mm256_setzero_si256();
    if (group == 16) quantize16(x, kept, inverse, quantized + g * group, sum);
    for (std::int64_t k = 0; k + 32 <= group; k += 32)
      quantize32(x + k, kept, inverse, quantized + g * group + k, sum);
    scales[g] = is_finite ? top / 127.0f : NAN;  // NaN makes every result NaN
    sums[g] = stored_sum(format, sum_of(sum), scales[g]);
  }
}

// Rounds to the nearest even; NaN stays NaN.
void to_bf16(const float* row, std::int64_t cols, std::uint16_t* out) {
  for (std::int64_t k = 0; k < cols; k += 8) {  // `cols` is a multiple of 8
    const __m256 values = _mm256_loadu_ps(row + k);
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), odd);
    const __m256i rounded = _mm256_add_epi32(bits, up);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k), _mm256_castsi256_si128(packed));
  }
}

// exp(x) to about 1e-7 relative: 2^n times a polynomial on [-ln2/2, ln2/2] (Taylor to x^6).
__m256 exp_ps(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-87.0f), _mm256_min_ps(_mm256_set1_ps(88.0f), x));  // keeps NaN
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.0f / 720);
  for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

__m256 sigmoid(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return _mm256_div_ps(one, _mm256_add_ps(one, exp_ps(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

// cap * tanh(x / cap). Near zero it uses the series, because 2 * sigmoid(2 x) - 1 loses digits
// there.
__m256 softcapped(__m256 x, float cap) {
  const __m256 one = _mm256_set1_ps(1.0f);
  x = _mm256_div_ps(x, _mm256_set1_ps(cap));
  const __m256 square = _mm256_mul_ps(x, x);
  const __m256 two = _mm256_set1_ps(2.0f);
  const __m256 far = _mm256_sub_ps(_mm256_mul_ps(two, sigmoid(_mm256_mul_ps(two, x))), one);
  const __m256 rest = _mm256_fmadd_ps(square, _mm256_set1_ps(2.0f / 15), _mm256_set1_ps(-1.0f / 3));
  const __m256 near = _mm256_mul_ps(x, _mm256_fmadd_ps(square, rest, one));
  const __m256 is_near = _mm256_cmp_ps(square, _mm256_set1_ps(0.01f), _CMP_LT_OQ);
  return _mm256_mul_ps(_mm256_blendv_ps(far, near, is_near), _mm256_set1_ps(cap));
}

// Minimum and maximum return their second operand if one is NaN, so the value comes second.
__m256 activated(const ActivationSpec& spec, __m256 gate, __m256 up) {
  switch (spec.kind) {
    case Activation::kGeluTanhGate: {
      const __m256 cube = _mm256_mul_ps(_mm256_mul_ps(gate, gate), gate);
      const __m256 inner = _mm256_fmadd_ps(cube, _mm256_set1_ps(0.044715f), gate);
      const __m256 s = sigmoid(_mm256_mul_ps(inner, _mm256_set1_ps(2 * 0.7978845608f)));
      return _mm256_mul_ps(_mm256_mul_ps(gate, s), up);
    }
    case Activation::kRelu2: {
      const __m256 positive = _mm256_max_ps(_mm256_setzero_ps(), gate);
      return _mm256_mul_ps(positive, positive);
    }
    case Activation::kSoftcapped: {
      const __m256 g = _mm256_mul_ps(softcapped(gate, spec.alpha), sigmoid(gate));
      return _mm256_mul_ps(g, softcapped(up, spec.limit));
    }
    case Activation::kSwiglu: {
      const __m256 limit = _mm256_set1_ps(spec.limit);
      const __m256 g = _mm256_min_ps(limit, gate);
      const __m256 u = _mm256_max_ps(_mm256_set1_ps(-spec.limit), _mm256_min_ps(limit, up));
      const __m256 s = sigmoid(_mm256_mul_ps(_mm256_set1_ps(spec.alpha), g));
      return _mm256_mul_ps(_mm256_mul_ps(g, s), _mm256_add_ps(u, _mm256_set1_ps(spec.offset)));
    }
    case Activation::kLimitedSilu: {
      const __m256 limit = _mm256_set1_ps(spec.limit);
      const __m256 g = _mm256_min_ps(limit, _mm256_mul_ps(gate, sigmoid(gate)));
      const __m256 u = _mm256_max_ps(_mm256_set1_ps(-spec.limit), _mm256_min_ps(limit, up));
      return _mm256_mul_ps(g, u);
    }
  }
  return gate;
}

void activate(const ActivationSpec& spec, const float* row, std::int64_t cols, float* inner) {
  const bool is_gated = spec.kind != Activation::kRelu2;
  for (std::int64_t k = 0; k < cols; k += 8) {  // `cols` is a multiple of 16
    const float* at = row + (is_gated ? (k / 16) * 32 + k % 16 : k);
    const __m256 up = is_gated ? _mm256_loadu_ps(at + 16) : _mm256_setzero_ps();
    _mm256_storeu_ps(inner + k, activated(spec, _mm256_loadu_ps(at), up));
  }
}

std::uint64_t read(const std::uint8_t* data, std::int64_t bytes) {
  __m256i sums[4] = {};
  for (std::int64_t i = 0; i + 128 <= bytes; i += 128)
    for (int c = 0; c < 4; ++c) sums[c] = _mm256_add_epi64(sums[c], load_dwords(data + i + 32 * c));
  const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]),
                                       _mm256_add_epi64(sums[2], sums[3]));
  alignas(32) std::uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

// The empty statement keeps the loop, because the compiler must assume that the registers are read.
template <class Add>
std::int64_t multiply(std::int64_t count, std::int64_t products, Add add) {
  __m256i sums[8] = {};
  __m256i one = _mm256_set1_epi8(1);
  for (std::int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 8
    for (__m256i& sum : sums) {
      __asm__ volatile("" : "+x"(one));
      sum = add(sum, one, one);
      __asm__ volatile("" : "+x"(sum));
    }
  }
  return count * 8 * products * 2;
}

std::int64_t multiply_int4(std::int64_t count) { return multiply(count, 32, Maddubs::add); }

std::int64_t multiply_int8(std::int64_t count) { return multiply(count, 16, add_words); }

std::int64_t multiply_bf16(std::int64_t count) {
  __m256 sums[8] = {};
  const __m256 one = _mm256_set1_ps(1.0f);
  for (std::int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 8
    for (__m256& sum : sums) {
      sum = _mm256_fmadd_ps(one, one, sum);
      __asm__ volatile("" : "+x"(sum));
    }
  }
  return count * 8 * 8 * 2;
}

}  // namespace

void look_up_avx2(const PackedMatrix& m, std::int64_t block, std::uint8_t* codes, float* scales) {
  look_up_block<Lookup256>(m, block, codes, scales);
}

const Kernels& avx2_kernels() {
  static const Kernels kernels{"avx2",   quantize, to_bf16, from_fp16,     to_fp16,
                               matmul,   activate, read,    multiply_int4, multiply_int8,
                               multiply_bf16};
  return kernels;
}

}  // namespace tandem
