// Hyper-connections with registers of 4 floats.
#include <algorithm>
#include <cstring>

#include "hyper_connections.hpp"

#define TANDEM_LANES 4

namespace tandem {
namespace {

#include "vectors.inl"

#include "hyper_connections_kernel.inl"

}  // namespace

const HyperKernels& portable_hyper() { return kHyperKernels; }

}  // namespace tandem
