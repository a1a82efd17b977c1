// The row-wise operations for any processor.
#include <algorithm>
#include <cmath>
#include <vector>

#include "rowwise.hpp"

namespace tandem {
namespace {

#include "rowwise_kernel.inl"

}  // namespace

const RowKernels& portable_rows() { return kRowKernels; }

}  // namespace tandem
