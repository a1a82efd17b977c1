// Quantising with registers of 4 floats.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.hpp"
#include "quantize.hpp"

#define TANDEM_LANES 4

namespace tandem {
namespace {

#include "vectors.inl"

#include "quantize_values.inl"

#include "quantize_kernel.inl"

}  // namespace

const QuantizeKernels& portable_quantize() { return kQuantizeKernels; }

}  // namespace tandem
