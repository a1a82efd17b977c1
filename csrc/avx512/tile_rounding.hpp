// How tiles round, for what registers compute beside them or in their place.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tandem {
namespace {

// While it lives registers round to nearest even, no numbers below the normal ones. The compiler does not
// know of it, but reads no memory before what begins it, and writes all before what ends it.
class TileRounding {
 public:
  TileRounding() {
    constexpr std::uint32_t kFlushed = 0x9FC0;  // FTZ, DAZ, and no exception
    __asm__ volatile("stmxcsr %0" : "=m"(before_));
    __asm__ volatile("ldmxcsr %0" : : "m"(kFlushed) : "memory");
  }
  ~TileRounding() { __asm__ volatile("ldmxcsr %0" : : "m"(before_) : "memory"); }
  TileRounding(const TileRounding&) = delete;
  TileRounding& operator=(const TileRounding&) = delete;

 private:
  std::uint32_t before_;
};

}  // namespace
}  // namespace tandem
