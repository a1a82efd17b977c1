// The process that started some threads. A process forked from it has none of them: joining one
// would end the process, and locks may be held forever.
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
