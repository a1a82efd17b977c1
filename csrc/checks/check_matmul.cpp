// Compares a matrix product of every instruction set with the portable one, on the activations that
// each quantises, to the same numbers. Only the order of additions differs, so the tolerance is tight. Also runs AVX-VNNI's
// kernels on processors that have this instruction only as part of AVX-512.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cpu_features.hpp"
#include "experts.hpp"
#include "random_products.hpp"

namespace {

using tandem::Format;
using tandem::Kernels;
using tandem::checks::Case;
using tandem::checks::Random;
using tandem::checks::relative_error;
using tandem::checks::Rounded;

constexpr int kRounds = 600;

std::vector<const Kernels*> kernels_here() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  const auto names = tandem::detect_cpu_features().instruction_sets;
  const auto has = [&](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
#if !defined(TANDEM_WITHOUT_AVX2)
  if (has("avx512vl") && has("avx512_vnni")) found.push_back(&tandem::avxvnni_kernels());
#endif
  for (const std::string& isa : tandem::available_isas()) {
    if (isa == "amx") found.push_back(&tandem::amx_kernels());
    if (isa == "avx512") found.push_back(&tandem::avx512_kernels());
    if (isa == "avx2") found.push_back(&tandem::avx2_kernels());
  }
#endif
  return found;
}

}  // namespace

int main() {
  Random random(4321);
  const auto all = kernels_here();
  for (int round = 0; round < kRounds; ++round) {
    const auto format = static_cast<Format>(round % tandem::kNumFormats);
    const Case c = make_case(random, format);
    const auto expected = multiply(tandem::portable_kernels(), c, Rounded(c));
    for (const Kernels* kernels : all) {
      const double error = relative_error(multiply(*kernels, c, Rounded(c, *kernels)), expected);
      // bf16's instruction rounds products differently and sums in pairs.
      if (!(error < 2e-5)) {
        std::printf("round %d: %s differs by %.2g, format %d, %d tokens\n", round, kernels->name,
                    error, static_cast<int>(format), static_cast<int>(c.num_tokens));
        return 1;
      }
    }
  }
  std::printf("%d random products agree on", kRounds);
  for (const Kernels* kernels : all) std::printf(" %s", kernels->name);
  std::printf("\n");
  return 0;
}
