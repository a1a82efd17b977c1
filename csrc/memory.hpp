// How memory lies: expert weights are read in long streams, which huge pages make a fifth faster.
#pragma once

#include <cstdint>

namespace tandem {

// Asks for huge pages for the whole ones inside data..data+bytes; best before it is first written.
// Returns false where the system has none to give.
bool advise_huge_pages(void* data, std::int64_t bytes);

}  // namespace tandem
