// Hyper-connections with registers of 16 floats.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "hyper_connections.hpp"

#define TANDEM_LANES 16

namespace tandem {
namespace {

#include "vectors.inl"

#include "hyper_connections_kernel.inl"

}  // namespace

const HyperKernels& avx512_hyper() { return kHyperKernels; }

}  // namespace tandem
