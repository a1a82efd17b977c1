// Sampling with registers of 4 floats.
#include <cstring>
#include <limits>

#include "sampling.hpp"

#define TANDEM_LANES 4

namespace tandem {
namespace {

#include "vectors.inl"

#include "sampling_kernel.inl"

}  // namespace

const SamplingKernel& portable_sampling() { return kSamplingKernel; }

}  // namespace tandem
