// Products on the tiles of AMX, which are emulated here: those of int8 have AVX-512's bits, those of a
// prompt are near the weights' values times the activations in bf16, and a token's bits do not depend on
// the others. Where there are tiles, theirs are the same bits. Needs AVX-512.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#define TANDEM_EMULATE_TILES
#define amx_kernels emulated_kernels
#define amx_prompt_kernels emulated_prompt_kernels
#include "../kernels_amx.cpp"
#undef amx_kernels
#undef amx_prompt_kernels

#include "cpu_features.hpp"
#include "experts.hpp"
#include "random_products.hpp"

namespace tandem {
const Kernels& amx_kernels();
const Kernels& amx_prompt_kernels();
}  // namespace tandem

namespace {

using tandem::Format;
using tandem::checks::Case;
using tandem::checks::multiply;
using tandem::checks::Random;
using tandem::checks::Rounded;

constexpr int kRounds = 400;

// The values of the weights times the activations as bf16 has them.
std::vector<float> expected(const Case& c, const Rounded& x) {
  const tandem::PackedMatrix m{c.format,      c.blocks,        c.cols, c.group,
                               c.data.data(), c.scales.data(), nullptr};
  std::vector<float> out(c.num_tokens * c.num_rows), weights(c.cols);
  for (std::int64_t r = 0; r < c.num_rows; ++r) {
    tandem::read_row(m, r, c.cols, weights.data());
    for (std::int64_t t = 0; t < c.num_tokens; ++t) {
      double sum = c.bias.empty() ? 0 : c.bias[r];
      for (std::int64_t k = 0; k < c.cols; ++k)
        sum += double{weights[k]} * tandem::bf16_to_float(x.bf16[t * c.cols + k]);
      out[t * c.num_rows + r] = static_cast<float>(sum);
    }
  }
  return out;
}

// The first token alone.
Case one_token(const Case& c) {
  Case one = c;
  one.num_tokens = 1;
  one.rows.resize(c.cols);
  return one;
}

const char* what_is_wrong(const Case& c, bool has_tiles) {
  const Rounded x(c);
  const auto of_step = multiply(tandem::emulated_kernels(), c, x);
  if (of_step != multiply(tandem::avx512_kernels(), c, x)) return "a step's bits";
  const auto of_prompt = multiply(tandem::emulated_prompt_kernels(), c, x);
  const bool has_values = tandem::has_lines(c.format) || !tandem::is_integer(c.format);
  // Weights round to bf16.
  if (has_values && !(tandem::checks::relative_error(of_prompt, expected(c, x)) < 4e-3))
    return "a prompt's values";
  const Case one = one_token(c);
  const auto alone = multiply(tandem::emulated_prompt_kernels(), one, Rounded(one));
  if (!std::equal(alone.begin(), alone.end(), of_prompt.begin())) return "one token's bits";
  if (has_tiles && of_step != multiply(tandem::amx_kernels(), c, x))
    return "a step's bits on tiles";
  if (has_tiles && of_prompt != multiply(tandem::amx_prompt_kernels(), c, x))
    return "a prompt's bits on tiles";
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
    const auto format = static_cast<Format>(round % tandem::kNumFormats);
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
