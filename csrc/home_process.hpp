// The process in which something started its threads. In one that was forked from it none of them is
// there: to join one ends the process, and locks may be taken for good.
#pragma once

#include <unistd.h>

#include <cstdint>

namespace tandem {

class HomeProcess {
 public:
  bool is_here() const { return id_ == ::getpid(); }

 private:
  std::int64_t id_ = ::getpid();
};

}  // namespace tandem
