// The parts of the Python module that are bound in files of their own.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <mutex>

#include "experts.hpp"

namespace tandem {

// What routing gives is checked here, where a row costs a nanosecond: nothing is read outside.
// Throws std::invalid_argument.
void require_in_range(const ExpertCall& call, std::int64_t num_rows);

// What a call from Python holds while it computes: an engine, but not the interpreter's lock, which
// is let go first, so that whoever has the engine can always end.
class Turn {
 public:
  template <typename Engine>
  explicit Turn(Engine& engine) : turn_(engine.busy()) {}

 private:
  nanobind::gil_scoped_release release_;
  std::lock_guard<std::mutex> turn_;
};

// Dense matrices, attention and small row-wise operations. After ExpertEngine, whose threads they use.
void bind_dense(nanobind::module_& m);

// The hybrid runtime's calls. After bind_dense, whose layers they take.
void bind_runtime(nanobind::module_& m);

}  // namespace tandem
