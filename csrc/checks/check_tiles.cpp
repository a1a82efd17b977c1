// Checks products on AMX's tiles, which are emulated here. int8 must have AVX-512's bits, bf16 must
// be near plain sums, and a token's bits must not depend on other tokens. On processors with tiles
// these must give the same bits. Needs AVX-512.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#define TANDEM_EMULATE_TILES
#define amx_kernels emulated_kernels
#include "../kernels_amx.cpp"
#undef amx_kernels

#include "cpu_features.hpp"
#include "experts.hpp"
#include "random_products.hpp"

namespace tandem {
const Kernels& amx_kernels();
}

namespace {

using tandem::Format;
using tandem::checks::Case;
using tandem::checks::multiply;
using tandem::checks::Random;
using tandem::checks::relative_error;
using tandem::checks::Rounded;

constexpr int kRounds = 120;
// All formats that tiles multiply.
constexpr Format kFormats[] = {Format::kBf16, Format::kInt8, Format::kInt4, Format::kInt4Zero};

Case one_token(const Case& c) {
  Case one = c;
  one.num_tokens = 1;
  one.rows.resize(c.cols);
  return one;
}

const char* what_is_wrong(const Case& c, bool has_tiles) {
  const Rounded x(c);
  const auto found = multiply(tandem::emulated_kernels(), c, x);
  if (c.format != Format::kBf16 && found != multiply(tandem::avx512_kernels(), c, x))
    return "AVX-512's bits";
  if (!(relative_error(found, multiply(tandem::portable_kernels(), c, x)) < 2e-5)) return "values";
  const Case one = one_token(c);
  const auto alone = multiply(tandem::emulated_kernels(), one, Rounded(one));
  if (!std::equal(alone.begin(), alone.end(), found.begin())) return "one token's bits";
  if (has_tiles && found != multiply(tandem::amx_kernels(), c, x)) return "the bits of tiles";
  return nullptr;
}

}  // namespace

int main() {
  const auto isas = tandem::available_isas();
  const auto has = [&](const char* isa) {
    return std::find(isas.begin(), isas.end(), isa) != isas.end();
  };
  if (!has("avx512")) return std::printf("tiles are not checked: no AVX-512\n"), 0;
  Random random(97531);
  for (int round = 0; round < kRounds; ++round) {
    const auto format = kFormats[round % std::size(kFormats)];
    const Case c = tandem::checks::make_case(random, format);
    if (const char* wrong = what_is_wrong(c, has("amx"))) {
      std::printf("round %d: %s, format %d, group %d, %d tokens\n", round, wrong,
                  static_cast<int>(format), static_cast<int>(c.group),
                  static_cast<int>(c.num_tokens));
      return 1;
    }
  }
  std::printf("%d random products on emulated tiles%s\n", kRounds,
              has("amx") ? ", and on tiles" : "");
  return 0;
}
