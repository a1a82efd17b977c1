// The row-wise operations for AVX-512.
#include <algorithm>
#include <cmath>
#include <vector>

#include "rowwise.hpp"

namespace tandem {
namespace {

#include "rowwise_kernel.inl"

}  // namespace

const RowKernels& avx512_rows() { return kRowKernels; }

}  // namespace tandem
