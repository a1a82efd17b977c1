// Attention with registers of 8 floats.
#include <cmath>
#include <cstring>

#include "attention.hpp"

#define TANDEM_LANES 8

namespace tandem {
namespace {

#include "attention_kernel.inl"

}  // namespace

const AttentionKernel& avx2_attention() {
  static const AttentionKernel kernel{attend};
  return kernel;
}

}  // namespace tandem
