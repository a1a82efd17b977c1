// CRC32C (Castagnoli), the checksum of an expert on the disk: by the processor's instruction where it
// has one, at the speed of memory, else from a table.
#pragma once

#include <cstdint>

namespace tandem {

// Of bytes that lie anywhere; `before` is the sum of what comes before them.
std::uint32_t crc32c(const std::uint8_t* data, std::int64_t bytes, std::uint32_t before = 0);

// The same, a byte at a time from a table.
std::uint32_t crc32c_portable(const std::uint8_t* data, std::int64_t bytes, std::uint32_t before = 0);

// The sum of two pieces one after the other, from the sum of each.
std::uint32_t join_crc32c(std::uint32_t first, std::uint32_t second, std::int64_t second_bytes);

}  // namespace tandem
