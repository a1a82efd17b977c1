// Quantising with registers of 16 floats.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.hpp"
#include "quantize.hpp"

#define TANDEM_LANES 16

namespace tandem {
namespace {

#include "vectors.inl"

#include "quantize_values.inl"

#include "quantize_kernel.inl"

}  // namespace

const QuantizeKernels& avx512_quantize() { return kQuantizeKernels; }

}  // namespace tandem
