// Recurrences with registers of 16 floats.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "recurrent.hpp"

#define TANDEM_LANES 16

namespace tandem {
namespace {

#include "vectors.inl"

#include "recurrent_kernel.inl"

}  // namespace

const RecurrentKernels& avx512_recurrent() { return kRecurrentKernels; }

}  // namespace tandem
