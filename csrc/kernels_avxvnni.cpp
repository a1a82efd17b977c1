// AVX-VNNI (Alder Lake onwards, without AVX-512): AVX2's kernels with one instruction that
// multiplies four bytes and adds them to 32 bits.
#include "avx2/integer.hpp"
#include "grid_product.hpp"

namespace tandem {
namespace {

struct Dpbusd {
  static constexpr bool kIs16Bit = false;

  static __m256i add(__m256i part, __m256i codes, __m256i x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(part, codes, x);
#else  // checks/ builds this file for processors with only AVX-512: the same arithmetic
    return _mm256_dpbusd_epi32(part, codes, x);
#endif
  }
  static __m256i flush(__m256i sum, __m256i part) { return _mm256_add_epi32(sum, part); }
};

void matmul(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
            std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  if (is_grid(m.format) && num_tokens == 1)
    return avx2_kernels().matmul(m, begin, end, x, num_tokens, num_rows, out, stride);
  if (is_grid(m.format))
    return multiply_grid({look_up_avx2, matmul}, m, begin, end, x, num_tokens, num_rows, out,
                         stride);
  const Product product{m, x, num_rows, out, stride};
  if (multiply_integers<Dpbusd>(product, begin, end, num_tokens)) return;
  avx2_kernels().matmul(m, begin, end, x, num_tokens, num_rows, out, stride);
}

// The empty statement keeps the loop, because the compiler must assume that the registers are read.
std::int64_t multiply_int8(std::int64_t count) {
  __m256i sums[8] = {};
  const __m256i one = _mm256_set1_epi8(1);
  for (std::int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 8
    for (__m256i& sum : sums) {
      sum = Dpbusd::add(sum, one, one);
      __asm__ volatile("" : "+x"(sum));
    }
  }
  return count * 8 * 32 * 2;
}

Kernels with_vnni() {
  Kernels kernels = avx2_kernels();
  kernels.name = "avxvnni";
  kernels.matmul = matmul;
  kernels.multiply_int4 = kernels.multiply_int8 = multiply_int8;
  return kernels;
}

}  // namespace

const Kernels& avxvnni_kernels() {
  static const Kernels kernels = with_vnni();
  return kernels;
}

}  // namespace tandem
