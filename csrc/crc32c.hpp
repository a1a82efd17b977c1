// CRC32C (Castagnoli), the checksum of an expert on the disk. Uses the processor's instruction, at
// the speed of memory, if there is one, and otherwise a table.
#pragma once

#include <cstdint>

namespace tandem {

// `data` need not be aligned; `before` is the checksum of the bytes before it.
std::uint32_t crc32c(const std::uint8_t* data, std::int64_t bytes, std::uint32_t before = 0);

// The same with a table, one byte at a time.
std::uint32_t crc32c_portable(const std::uint8_t* data, std::int64_t bytes, std::uint32_t before = 0);

// Returns the checksum of two consecutive pieces from the checksums of both.
std::uint32_t join_crc32c(std::uint32_t first, std::uint32_t second, std::int64_t second_bytes);

}  // namespace tandem
