#include "memory.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#endif

namespace tandem {

bool advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::int64_t bytes) {
#if defined(__linux__)
  constexpr std::uintptr_t kPage = 2u << 20;
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (address + kPage - 1) & ~(kPage - 1);
  const std::uintptr_t end = (address + static_cast<std::uintptr_t>(bytes)) & ~(kPage - 1);
  if (begin >= end) return false;
  return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

void read_ahead([[maybe_unused]] const void* data, [[maybe_unused]] std::int64_t bytes) {
#if defined(__linux__)
  // Linux reads at most one read-ahead window per advice; this is the usual window.
  constexpr std::uintptr_t kAdvisedBytes = 128 << 10;
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = address & ~(page - 1);
  const std::uintptr_t end = address + static_cast<std::uintptr_t>(bytes);
  unsigned char is_there = 0;
  if (mincore(reinterpret_cast<void*>(begin), 1, &is_there) != 0 || (is_there & 1) != 0) return;
  for (std::uintptr_t at = begin; at < end; at += kAdvisedBytes)
    madvise(reinterpret_cast<void*>(at), std::min(kAdvisedBytes, end - at), MADV_WILLNEED);
#endif
}

void give_back([[maybe_unused]] void* data, [[maybe_unused]] std::int64_t bytes) {
#if defined(__linux__)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (address + page - 1) & ~(page - 1);
  const std::uintptr_t end = (address + static_cast<std::uintptr_t>(bytes)) & ~(page - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#endif
}

}  // namespace tandem
