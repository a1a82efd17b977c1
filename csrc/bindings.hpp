// Parts of the Python module that are bound in other files.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "experts.hpp"
#include "values.hpp"

namespace tandem {

class Program;

// The number is that of TOKEN_DTYPES in tandem.kernels.native. Throws std::invalid_argument.
inline ValueType token_type(int type) {
  if (type < 0 || type > static_cast<int>(ValueType::kFp16))
    throw std::invalid_argument("type " + std::to_string(type) + ", expected 0, 1 or 2");
  return static_cast<ValueType>(type);
}

// An expert's address. The caller is responsible for the memory.
inline const std::uint8_t* expert_at(std::uintptr_t address) {
  return reinterpret_cast<const std::uint8_t*>(address);
}

// Returns an activation that fits the layout. Throws std::invalid_argument.
ActivationSpec activation_spec(const ExpertLayout& layout, int activation, float alpha, float limit,
                               float offset);

// Checks the router's indices, so that nothing outside is read; a routed token costs a nanosecond
// here. Throws std::invalid_argument.
void require_in_range(const ExpertCall& call, std::int64_t num_rows);

// Locks an engine for a call from Python. Releases the interpreter's lock first, so that the thread
// that has the engine can always finish.
class Turn {
 public:
  template <typename Engine>
  explicit Turn(Engine& engine) : turn_(engine.busy()) {}

 private:
  nanobind::gil_scoped_release release_;
  std::lock_guard<std::mutex> turn_;
};

// Dense matrices, attention and small row-wise operations. Called after binding ExpertEngine, whose
// threads they use.
void bind_dense(nanobind::module_& m);

// Programs of the operations that bind_dense binds.
void bind_program(nanobind::module_& m);

// Small tensor operations of programs, and their operands. Called by bind_program.
void bind_index_keys(nanobind::module_& m);
void bind_tensor_ops(nanobind::class_<Program>& program);

// The hybrid runtime's calls. Called after bind_dense, which binds their layers.
void bind_runtime(nanobind::module_& m);

// The decider of layers. Called by bind_runtime.
void bind_decider(nanobind::module_& m);

// Captured steps. Called after bind_runtime, which binds their tables.
void bind_coordinator(nanobind::module_& m);

// The CPU twin, which runs them without a GPU. Called by bind_coordinator.
void bind_twin(nanobind::module_& m);

// Experts on the disk, with slots in memory. Called after bind_runtime, which binds their tables.
void bind_disk(nanobind::module_& m);

}  // namespace tandem
