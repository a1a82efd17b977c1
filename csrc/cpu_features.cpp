#include "cpu_features.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace tandem {
namespace {

#if defined(__x86_64__)

using Registers = std::array<std::uint32_t, 4>;  // eax, ebx, ecx, edx

Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
  Registers r{};
  __get_cpuid_count(leaf, subleaf, &r[0], &r[1], &r[2], &r[3]);
  return r;
}

std::uint64_t enabled_state() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

// XCR0 bits: registers that the operating system saves on a context switch, which may therefore be
// used.
constexpr std::uint64_t kYmm = 0x6;
constexpr std::uint64_t kZmm = kYmm | 0xE0;
constexpr std::uint64_t kTiles = 0x60000;

struct Feature {
  const char* name;
  std::uint32_t leaf, subleaf, reg, bit;
  std::uint64_t state;
};

constexpr Feature kFeatures[] = {
    {"sse4_2", 1, 0, 2, 20, 0},
    {"f16c", 1, 0, 2, 29, kYmm},
    {"fma", 1, 0, 2, 12, kYmm},
    {"avx", 1, 0, 2, 28, kYmm},
    {"avx2", 7, 0, 1, 5, kYmm},
    {"avx_vnni", 7, 1, 0, 4, kYmm},
    {"avx_vnni_int8", 7, 1, 3, 4, kYmm},
    {"avx512f", 7, 0, 1, 16, kZmm},
    {"avx512bw", 7, 0, 1, 30, kZmm},
    {"avx512vl", 7, 0, 1, 31, kZmm},
    {"avx512vbmi", 7, 0, 2, 1, kZmm},
    {"avx512_vnni", 7, 0, 2, 11, kZmm},
    {"avx512_bf16", 7, 1, 0, 5, kZmm},
    {"avx512_fp16", 7, 0, 3, 23, kZmm},
    {"amx_tile", 7, 0, 3, 24, kTiles},
    {"amx_int8", 7, 0, 3, 25, kTiles},
    {"amx_bf16", 7, 0, 3, 22, kTiles},
};

void detect_x86(CpuFeatures& found) {
  const Registers id = cpuid(0, 0);
  char vendor[13] = {};
  std::memcpy(vendor, &id[1], 4);
  std::memcpy(vendor + 4, &id[3], 4);
  std::memcpy(vendor + 8, &id[2], 4);
  found.vendor = vendor;

  constexpr std::uint32_t kOsXsave = 1u << 27;
  const std::uint64_t state = (cpuid(1, 0)[2] & kOsXsave) ? enabled_state() : 0;
  for (const Feature& f : kFeatures) {
    if (f.leaf > id[0]) continue;
    const bool present = (cpuid(f.leaf, f.subleaf)[f.reg] >> f.bit) & 1u;
    if (present && (state & f.state) == f.state) found.instruction_sets.emplace_back(f.name);
  }
}

#endif  // __x86_64__

#if defined(__GLIBC__)
std::int64_t known_or_zero(int name) {
  const long value = sysconf(name);
  return value > 0 ? value : 0;
}
#endif

}  // namespace

bool have_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool found = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return found;
#else
  return false;
#endif
}

CpuFeatures detect_cpu_features() {
  CpuFeatures found;
#if defined(__x86_64__)
  detect_x86(found);
#elif defined(__aarch64__)
  found.vendor = "arm";
  found.instruction_sets.emplace_back("neon");
#if defined(__linux__)
  constexpr unsigned long kHasCrc32 = 1 << 7;  // HWCAP_CRC32
  if ((getauxval(AT_HWCAP) & kHasCrc32) != 0) found.instruction_sets.emplace_back("crc32");
#else
  found.instruction_sets.emplace_back("crc32");  // all of Apple's processors have it
#endif
#endif
#if defined(__GLIBC__)
  found.l1_data_bytes = known_or_zero(_SC_LEVEL1_DCACHE_SIZE);
  found.l2_bytes = known_or_zero(_SC_LEVEL2_CACHE_SIZE);
  found.l3_bytes = known_or_zero(_SC_LEVEL3_CACHE_SIZE);
#endif
  return found;
}

}  // namespace tandem
