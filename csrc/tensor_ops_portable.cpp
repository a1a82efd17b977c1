// The small tensor operations for any processor.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "half.hpp"
#include "tensor_ops.hpp"

#define TANDEM_LANES 4

namespace tandem {
namespace {

#include "vectors.inl"

#include "tensor_elements.inl"
#include "tensor_kernel.inl"

}  // namespace

const TensorKernels& portable_tensors() { return kTensorKernels; }

}  // namespace tandem
