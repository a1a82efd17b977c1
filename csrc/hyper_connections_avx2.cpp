// Hyper-connections with registers of 8 floats.
#include <algorithm>
#include <cstring>

#include "hyper_connections.hpp"

#define TANDEM_LANES 8

namespace tandem {
namespace {

#include "vectors.inl"

#include "hyper_connections_kernel.inl"

}  // namespace

const HyperKernels& avx2_hyper() { return kHyperKernels; }

}  // namespace tandem
