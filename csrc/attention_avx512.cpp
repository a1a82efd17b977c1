// Attention with registers of 16 floats.
#include <cmath>
#include <cstring>

#include "attention.hpp"

#define TANDEM_LANES 16

namespace tandem {
namespace {

#include "attention_kernel.inl"

}  // namespace

const AttentionKernel& avx512_attention() {
  static const AttentionKernel kernel{attend};
  return kernel;
}

}  // namespace tandem
