// Quantising with registers of 8 floats.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.hpp"
#include "quantize.hpp"

#define TANDEM_LANES 8

namespace tandem {
namespace {

#include "vectors.inl"

#include "quantize_values.inl"

#include "quantize_kernel.inl"

}  // namespace

const QuantizeKernels& avx2_quantize() { return kQuantizeKernels; }

}  // namespace tandem
