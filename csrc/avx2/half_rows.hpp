// Converts rows of fp16 and fp32 into each other with F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "half.hpp"

namespace tandem {

static inline void from_fp16(const std::uint16_t* bits, std::int64_t count, float* out) {
  std::int64_t k = 0;
  for (; k + 8 <= count; k += 8)
    _mm256_storeu_ps(out + k, _mm256_cvtph_ps(_mm_loadu_si128(
                                  reinterpret_cast<const __m128i*>(bits + k))));
  for (; k < count; ++k) out[k] = half_to_float(bits[k]);
}

static inline void to_fp16(const float* values, std::int64_t count, std::uint16_t* out) {
  std::int64_t k = 0;
  for (; k + 8 <= count; k += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k),
                     _mm256_cvtps_ph(_mm256_loadu_ps(values + k), _MM_FROUND_TO_NEAREST_INT));
  for (; k < count; ++k) out[k] = float_to_half(values[k]);
}

}  // namespace tandem
