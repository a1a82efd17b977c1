#include "crc32c.hpp"

#include <array>
#include <cstring>

#include "cpu_features.hpp"

// Assembly: the instruction needs no compiler flags then, so the code that chooses runs on every
// processor.
#if defined(__x86_64__) || defined(__aarch64__)
#define TANDEM_HAS_CRC32C 1
#endif

namespace tandem {
namespace {

// Polynomials modulo Castagnoli's, with reflected bits: the highest bit is x^0.
constexpr std::uint32_t kPolynomial = 0x82F63B78;
constexpr std::uint32_t kOne = 0x80000000;
constexpr std::uint32_t kEightBits = 0x00800000;

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ (kPolynomial & (0 - (a & 1))); }

constexpr std::uint32_t product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t sum = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    sum ^= b & (0 - static_cast<std::uint32_t>((a & bit) != 0));
    b = times_x(b);
  }
  return sum;
}

// Factors for a state by which 2^k bytes of zeros are appended.
constexpr std::array<std::uint32_t, 63> make_zeros() {
  std::array<std::uint32_t, 63> zeros{};
  std::uint32_t power = kEightBits;
  for (auto& factor : zeros) {
    factor = power;
    power = product(power, power);
  }
  return zeros;
}

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    table[byte] = byte;
    for (int bit = 0; bit < 8; ++bit) table[byte] = times_x(table[byte]);
  }
  return table;
}

constexpr auto kZeros = make_zeros();
constexpr auto kTable = make_table();

std::uint32_t factor_of_zeros(std::int64_t bytes) {
  std::uint32_t factor = kOne;
  for (std::size_t k = 0; bytes != 0; ++k, bytes >>= 1)
    if ((bytes & 1) != 0) factor = product(factor, kZeros[k]);
  return factor;
}

#if defined(TANDEM_HAS_CRC32C)

std::uint64_t word_at(const std::uint8_t* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

#if defined(__x86_64__)
inline std::uint32_t next(std::uint32_t state, std::uint64_t word) {
  std::uint64_t wide = state;
  __asm__("crc32q %1, %0" : "+r"(wide) : "r"(word));
  return static_cast<std::uint32_t>(wide);
}
inline std::uint32_t next_byte(std::uint32_t state, std::uint8_t byte) {
  __asm__("crc32b %1, %0" : "+r"(state) : "r"(byte));
  return state;
}
constexpr const char* kInstruction = "sse4_2";
#else
inline std::uint32_t next(std::uint32_t state, std::uint64_t word) {
  __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(word));
  return state;
}
inline std::uint32_t next_byte(std::uint32_t state, std::uint8_t byte) {
  __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(state) : "r"(byte));
  return state;
}
constexpr const char* kInstruction = "crc32";
#endif

// The instruction has a latency of three cycles but starts every cycle, so three streams run side
// by side. Joining them takes some 700 cycles, less if few bits of the length of a third are set.
constexpr std::int64_t kLeastSplit = 12 << 10;
constexpr std::int64_t kThirdMultiple = 256;

std::uint32_t crc32c_native(const std::uint8_t* data, std::int64_t bytes, std::uint32_t before) {
  std::uint32_t state = ~before;
  if (bytes >= kLeastSplit) {
    const std::int64_t third = bytes / 3 / kThirdMultiple * kThirdMultiple;
    std::uint32_t second = 0, last = 0;
    for (std::int64_t i = 0; i < third; i += 8) {
      state = next(state, word_at(data + i));
      second = next(second, word_at(data + third + i));
      last = next(last, word_at(data + 2 * third + i));
    }
    const std::uint32_t factor = factor_of_zeros(third);
    state = product(product(state, factor) ^ second, factor) ^ last;
    data += 3 * third;
    bytes -= 3 * third;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) state = next(state, word_at(data));
  for (; bytes > 0; ++data, --bytes) state = next_byte(state, *data);
  return ~state;
}

bool has_instruction() {
  for (const std::string& name : detect_cpu_features().instruction_sets)
    if (name == kInstruction) return true;
  return false;
}

#endif  // TANDEM_HAS_CRC32C

using Crc32c = std::uint32_t (*)(const std::uint8_t*, std::int64_t, std::uint32_t);

Crc32c fastest() {
#if defined(TANDEM_HAS_CRC32C)
  if (has_instruction()) return crc32c_native;
#endif
  return crc32c_portable;
}

}  // namespace

std::uint32_t crc32c(const std::uint8_t* data, std::int64_t bytes, std::uint32_t before) {
  static const Crc32c chosen = fastest();
  return chosen(data, bytes, before);
}

std::uint32_t crc32c_portable(const std::uint8_t* data, std::int64_t bytes, std::uint32_t before) {
  std::uint32_t state = ~before;
  for (std::int64_t i = 0; i < bytes; ++i) state = kTable[(state ^ data[i]) & 255] ^ (state >> 8);
  return ~state;
}

std::uint32_t join_crc32c(std::uint32_t first, std::uint32_t second, std::int64_t second_bytes) {
  return product(first, factor_of_zeros(second_bytes)) ^ second;
}

}  // namespace tandem
