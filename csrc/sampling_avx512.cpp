// Sampling with registers of 16 floats.
#include <immintrin.h>

#include <cstring>
#include <limits>

#include "sampling.hpp"

#define TANDEM_LANES 16

namespace tandem {
namespace {

#include "vectors.inl"

#include "sampling_kernel.inl"

}  // namespace

const SamplingKernel& avx512_sampling() { return kSamplingKernel; }

}  // namespace tandem
