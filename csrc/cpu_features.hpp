// What this processor supports: the instruction sets that the kernels choose among, and its cache
// sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct CpuFeatures {
  std::string vendor;
  // Names as in Linux' /proc/cpuinfo ("avx2", "avx512f", "avx512_vnni", "amx_int8", ...), in a
  // fixed order. Only those that the operating system enables (XCR0).
  std::vector<std::string> instruction_sets;
  std::int64_t l1_data_bytes = 0;  // per core
  std::int64_t l2_bytes = 0;  // per core
  std::int64_t l3_bytes = 0;  // per cache, which several cores share
};

// Queries the processor (CPUID on x86, the kernel elsewhere). Takes microseconds; keeps nothing.
CpuFeatures detect_cpu_features();

// Requests the registers of AMX's tiles from the system, once. A process has them only after that.
bool have_tiles();

// Kernels are named "amx", "avx512", "avxvnni", "avx2" and "portable". Each has all that the later
// ones have, except for products.
inline bool has_avx512(const std::string& isa) { return isa == "amx" || isa == "avx512"; }
inline bool has_avx2(const std::string& isa) { return isa == "avxvnni" || isa == "avx2"; }

}  // namespace tandem
