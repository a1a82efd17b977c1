// Recurrences with registers of 8 floats.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "recurrent.hpp"

#define TANDEM_LANES 8

namespace tandem {
namespace {

#include "vectors.inl"

#include "recurrent_kernel.inl"

}  // namespace

const RecurrentKernels& avx2_recurrent() { return kRecurrentKernels; }

}  // namespace tandem
