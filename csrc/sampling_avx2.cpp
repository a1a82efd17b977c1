// Sampling with registers of 8 floats.
#include <cstring>
#include <limits>

#include "sampling.hpp"

#define TANDEM_LANES 8

namespace tandem {
namespace {

#include "vectors.inl"

#include "sampling_kernel.inl"

}  // namespace

const SamplingKernel& avx2_sampling() { return kSamplingKernel; }

}  // namespace tandem
