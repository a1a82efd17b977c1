// Memory from the system: huge pages, which make long streams a fifth faster, and mapped files.
#pragma once

#include <cstdint>

namespace tandem {

// Requests huge pages for the whole ones within data..data+bytes; best before the first write.
// Returns false if the system has none.
bool advise_huge_pages(void* data, std::int64_t bytes);

// Has the system read the part of a mapped file at data..data+bytes without waiting. Does nothing
// if its first page is in memory, as for all other memory.
void read_ahead(const void* data, std::int64_t bytes);

// Returns the whole pages within data..data+bytes to the system; they are zero when they are next
// used. Only for private memory.
void give_back(void* data, std::int64_t bytes);

}  // namespace tandem
