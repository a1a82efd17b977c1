// Compares CRC32C by the processor's instruction and by table with a bitwise version, for every
// length at every offset, in buffers of exactly that size. Built with sanitizers.
#include <cstdio>
#include <vector>

#include "crc32c.hpp"
#include "random.hpp"

namespace {

using tandem::checks::Random;
using Index = std::int64_t;

constexpr Index kShort = 64;
// Around the length where streams begin.
constexpr Index kLong[] = {12287, 12288, 12289, 13055, 16384, 100003};

std::uint32_t bit_at_a_time(const std::uint8_t* data, Index bytes, std::uint32_t before) {
  std::uint32_t state = ~before;
  for (Index i = 0; i < bytes; ++i) {
    state ^= data[i];
    for (int bit = 0; bit < 8; ++bit)
      state = (state >> 1) ^ ((state & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~state;
}

bool agrees(Random& random, Index bytes, Index begin) {
  std::vector<std::uint8_t> data(static_cast<std::size_t>(begin + bytes));
  for (auto& byte : data) byte = static_cast<std::uint8_t>(random.between(0, 255));
  const auto before = static_cast<std::uint32_t>(random.between(0, 1 << 30));
  const std::uint8_t* at = data.data() + begin;
  const std::uint32_t expected = bit_at_a_time(at, bytes, before);
  const Index first = random.between(0, bytes);
  const std::uint32_t joined = tandem::join_crc32c(tandem::crc32c(at, first, before),
                                                   tandem::crc32c(at + first, bytes - first),
                                                   bytes - first);
  return tandem::crc32c(at, bytes, before) == expected &&
         tandem::crc32c_portable(at, bytes, before) == expected && joined == expected;
}

}  // namespace

int main() {
  Random random(1);
  int sums = 0;
  for (Index begin = 0; begin < 9; ++begin) {
    std::vector<Index> lengths(std::begin(kLong), std::end(kLong));
    for (Index bytes = 0; bytes <= kShort; ++bytes) lengths.push_back(bytes);
    for (const Index bytes : lengths) {
      if (!agrees(random, bytes, begin)) {
        std::printf("%lld bytes at %lld have another sum\n", static_cast<long long>(bytes),
                    static_cast<long long>(begin));
        return 1;
      }
      ++sums;
    }
  }
  std::printf("%d sums agree\n", sums);
  return 0;
}
