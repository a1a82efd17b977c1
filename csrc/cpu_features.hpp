// What this processor can do: instruction sets that the kernels choose between, and cache sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct CpuFeatures {
  std::string vendor;
  // Names as in Linux' /proc/cpuinfo ("avx2", "avx512f", "avx512_vnni", "amx_int8", ...), only those
  // that the operating system also enables (XCR0), in a fixed order.
  std::vector<std::string> instruction_sets;
  std::int64_t l1_data_bytes = 0;  // of one core
  std::int64_t l2_bytes = 0;       // of one core
  std::int64_t l3_bytes = 0;       // of one cache, which several cores share
};

// Ask the processor (CPUID on x86, the kernel elsewhere). Costs microseconds; keeps nothing.
CpuFeatures detect_cpu_features();

// Asks the system for the registers of AMX's tiles, once: a process has them only then.
bool have_tiles();

// Of names of kernels, "amx", "avx512", "avxvnni", "avx2" and "portable": each has what those behind it
// have, but for products.
inline bool has_avx512(const std::string& isa) { return isa == "amx" || isa == "avx512"; }
inline bool has_avx2(const std::string& isa) { return isa == "avxvnni" || isa == "avx2"; }

}  // namespace tandem
