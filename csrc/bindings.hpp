// The parts of the Python module that are bound in files of their own.
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

// What the experts' calls pass: TOKEN_DTYPES in tandem.kernels.native. Throws std::invalid_argument.
inline ValueType token_type(int type) {
  if (type < 0 || type > static_cast<int>(ValueType::kFp16))
    throw std::invalid_argument("type " + std::to_string(type) + ", expected 0, 1 or 2");
  return static_cast<ValueType>(type);
}

// Addresses of experts, wherever they lie: those who made them know the memory.
inline const std::uint8_t* expert_at(std::uintptr_t address) {
  return reinterpret_cast<const std::uint8_t*>(address);
}

// An activation that fits a layout. Throws std::invalid_argument.
ActivationSpec activation_spec(const ExpertLayout& layout, int activation, float alpha, float limit,
                               float offset);

// What routing gives is checked here, where a row costs a nanosecond: nothing is read outside.
// Throws std::invalid_argument.
void require_in_range(const ExpertCall& call, std::int64_t num_rows);

// What a call from Python holds while it computes: an engine, but not the interpreter's lock, which
// is let go first, so that the thread that has the engine can always end.
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

// Programs of what bind_dense has bound.
void bind_program(nanobind::module_& m);

// What a program has of small tensor operations, and what they refer to. Called by bind_program.
void bind_index_keys(nanobind::module_& m);
void bind_tensor_ops(nanobind::class_<Program>& program);

// The hybrid runtime's calls. After bind_dense, whose layers they take.
void bind_runtime(nanobind::module_& m);

// What decides about layers. Called by bind_runtime.
void bind_decider(nanobind::module_& m);

// Captured steps. After bind_runtime, whose tables they take.
void bind_coordinator(nanobind::module_& m);

// What answers them without a GPU. Called by bind_coordinator.
void bind_twin(nanobind::module_& m);

// Experts on the disk, with slots in memory. After bind_runtime, whose tables they take.
void bind_disk(nanobind::module_& m);

}  // namespace tandem
