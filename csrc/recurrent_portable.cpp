// Recurrences with registers of 4 floats.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "recurrent.hpp"

#define TANDEM_LANES 4

namespace tandem {
namespace {

#include "vectors.inl"

#include "recurrent_kernel.inl"

}  // namespace

const RecurrentKernels& portable_recurrent() { return kRecurrentKernels; }

}  // namespace tandem
