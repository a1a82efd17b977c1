// Memory as the system gives it: huge pages, which make long streams a fifth faster, and mapped files.
#pragma once

#include <cstdint>

namespace tandem {

// Asks for huge pages for the whole ones inside data..data+bytes; best before it is first written.
// Returns false where the system has none to give.
bool advise_huge_pages(void* data, std::int64_t bytes);

// Has the system read the part of a mapped file that lies at data..data+bytes, without waiting;
// nothing where its first page is in memory, as all of any other memory is.
void read_ahead(const void* data, std::int64_t bytes);

// Gives the whole pages inside data..data+bytes back to the system; they are zero when they are next
// used. For private memory alone.
void give_back(void* data, std::int64_t bytes);

}  // namespace tandem
