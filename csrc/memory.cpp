#include "memory.hpp"

#if defined(__linux__)
#include <sys/mman.h>
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

}  // namespace tandem
