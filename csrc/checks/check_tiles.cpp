// Checks products on AMX's tiles, which are emulated here. int8 must have AVX-512's bits, bf16 must
// be near plain sums, and a token's bits must not depend on other tokens, nor on whether registers add
// them up. On processors with tiles these must give the same bits. Needs AVX-512.
#include <algorithm>
#include <cstdio>
#include <cstring>
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
constexpr Format kFormats[] = {Format::kBf16, Format::kFp8, Format::kInt8, Format::kInt4,
                               Format::kInt4Zero};

// Tokens of registers, and some of tiles beside them.
constexpr std::int64_t kFewest = 8, kWildTokens = 19;
static_assert(tandem::kMostInTileOrder<Format::kBf16> < kFewest);

bool begins_with(const std::vector<float>& all, const std::vector<float>& few) {
  return std::memcmp(all.data(), few.data(), few.size() * sizeof(float)) == 0;
}

bool has_same_bits(const Case& c, const std::vector<float>& found) {
  for (std::int64_t t = 1; t <= std::min(kFewest, c.num_tokens); ++t) {
    const Case few = tandem::checks::first_tokens(c, t);
    if (!begins_with(found, multiply(tandem::emulated_kernels(), few, Rounded(few)))) return false;
  }
  return true;
}

const char* what_is_wrong(const Case& c, bool has_tiles) {
  const Rounded x(c);
  const auto found = multiply(tandem::emulated_kernels(), c, x);
  if (tandem::is_integer(c.format) && found != multiply(tandem::avx512_kernels(), c, x))
    return "AVX-512's bits";
  if (!(relative_error(found, multiply(tandem::portable_kernels(), c, x)) < 2e-5)) return "values";
  if (!has_same_bits(c, found)) return "a few tokens' bits";
  if (has_tiles && found != multiply(tandem::amx_kernels(), c, x)) return "the bits of tiles";
  return nullptr;
}

// bf16 with exponents from..to, one in 40 infinite, zero, or below the normal numbers.
std::uint16_t wild_bits(Random& random, std::int64_t from, std::int64_t to) {
  constexpr std::uint16_t kSpecial[] = {0, 1, 0x7F, 0x80, 0x7F7F, 0x7F80};
  const auto sign = static_cast<std::uint16_t>(random.between(0, 1) << 15);
  if (random.between(0, 39) == 0)
    return sign | kSpecial[random.between(0, std::ssize(kSpecial) - 1)];
  return static_cast<std::uint16_t>(sign | random.between(from, to) << 7 | random.between(0, 127));
}

// Numbers of all sizes, or those whose products are about the smallest normal number.
Case wild_case(Random& random) {
  Case c = tandem::checks::make_case(random, Format::kBf16);
  const bool is_small = random.between(0, 1);
  const std::int64_t from = is_small ? 55 : 0, to = is_small ? 68 : 254;
  c.num_tokens = kWildTokens;
  c.rows.resize(kWildTokens * c.cols);
  for (float& value : c.rows) value = tandem::bf16_to_float(wild_bits(random, from, to));
  const auto put = [&](std::size_t at, std::uint16_t bits) {
    std::memcpy(c.data.data() + at, &bits, 2);
  };
  for (std::size_t at = 0; at < c.data.size(); at += 2) put(at, wild_bits(random, from, to));
  // 2^-126 - 2^-150, of columns 0 and 2: 24 bits hold it, so it does not become normal by rounding.
  std::fill_n(c.rows.begin(), c.cols, 0.0f);
  c.rows[0] = 0x1p-63f;
  c.rows[2] = -0x1p-74f;
  put(0, tandem::float_to_bf16(0x1p-63f));
  put(64, tandem::float_to_bf16(0x1p-76f));
  return c;
}

const char* what_is_wrong_with_wild(const Case& c, bool has_tiles) {
  const Rounded x(c);
  const auto found = multiply(tandem::emulated_kernels(), c, x);
  if (!has_same_bits(c, found)) return "a few tokens' bits";
  if (has_tiles && !begins_with(found, multiply(tandem::amx_kernels(), c, x)))
    return "the bits of tiles";
  return nullptr;
}

// Each code in a line of its own, and beside others: shifts and tables give the same.
bool decodes_every_code() {
  const tandem::E4m3Decoder decoder;
  for (int code = 0; code < 256; ++code)
    for (const int other : {code, 0x40, 0}) {
      std::uint8_t codes[64];
      std::memset(codes, other, sizeof codes);
      codes[0] = static_cast<std::uint8_t>(code);
      alignas(64) std::uint16_t found[64];
      __m512i columns[2];
      decoder.decode(codes, columns);
      std::memcpy(found, columns, sizeof found);
      const auto bits = [](int of) {
        return tandem::float_to_bf16(tandem::e4m3_to_float(static_cast<std::uint8_t>(of)));
      };
      for (int i = 0; i < 64; ++i)
        if (found[i] != bits(i == 0 ? code : other)) return false;
    }
  return true;
}

bool is_right(int round, const char* wrong, const Case& c) {
  if (wrong == nullptr) return true;
  std::printf("round %d: %s, format %d, group %d, %d columns, %d tokens\n", round, wrong,
              static_cast<int>(c.format), static_cast<int>(c.group), static_cast<int>(c.cols),
              static_cast<int>(c.num_tokens));
  return false;
}

}  // namespace

int main() {
  const auto isas = tandem::available_isas();
  const auto has = [&](const char* isa) {
    return std::find(isas.begin(), isas.end(), isa) != isas.end();
  };
  if (!has("avx512")) return std::printf("tiles are not checked: no AVX-512\n"), 0;
  if (!decodes_every_code()) return std::printf("a code of fp8 has another value\n"), 1;
  Random random(97531);
  for (int round = 0; round < kRounds; ++round) {
    const Case c = tandem::checks::make_case(random, kFormats[round % std::size(kFormats)]);
    if (!is_right(round, what_is_wrong(c, has("amx")), c)) return 1;
    if (round % std::size(kFormats) != 0) continue;
    const Case wild = wild_case(random);
    if (!is_right(round, what_is_wrong_with_wild(wild, has("amx")), wild)) return 1;
  }
  std::printf("%d random products on emulated tiles%s\n", kRounds,
              has("amx") ? ", and on tiles" : "");
  return 0;
}
