// The row-wise operations for AVX2.
#include <algorithm>
#include <cmath>
#include <vector>

#include "rowwise.hpp"

namespace tandem {
namespace {

#include "rowwise_kernel.inl"

}  // namespace

const RowKernels& avx2_rows() { return kRowKernels; }

}  // namespace tandem
