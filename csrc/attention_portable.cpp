// Attention with registers of 4 floats.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention.hpp"

#define TANDEM_LANES 4

namespace tandem {
namespace {

#include "vectors.inl"

#include "attention_kernel.inl"

}  // namespace

const AttentionKernel& portable_attention() {
  static const AttentionKernel kernel{attend_fp32};
  return kernel;
}

}  // namespace tandem
