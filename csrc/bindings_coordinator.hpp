// The coordinator as a Python object, also for those that answer layers in place of a GPU.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings_calls.hpp"
#include "coordinator/coordinator.hpp"
#include "coordinator/copying.hpp"
#include "coordinator/driver_copies.hpp"
#include "coordinator/step_decisions.hpp"

namespace tandem {

using Layers = std::vector<RoutedLayer>;
using CopyTuple = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>;

// Returns the last line of an error that Python printed: the message.
inline std::string last_line(std::string text) {
  // Python's limited API ends messages with line breaks.
  while (!text.empty() && text.back() == '\n') text.pop_back();
  if (text.empty()) return text;
  return text.substr(text.find_last_of('\n') + 1);
}

// Wraps a Python function for calls from a native thread; its exceptions become C++ errors.
template <typename... Arguments>
std::function<void(Arguments...)> calling(const nanobind::object& function) {
  if (function.is_none()) return nullptr;
  const nanobind::handle callee = function;  // the owner of the thread keeps it alive
  return [callee](Arguments... arguments) {
    const nanobind::gil_scoped_acquire acquire;
    try {
      callee(arguments...);
    } catch (nanobind::python_error& error) {
      throw std::runtime_error(last_line(error.what()));
    }
  };
}

// Where a GPU's copies go: its driver, and its table of addresses.
struct DriverLink {
  std::shared_ptr<Driver> driver;
  std::uint64_t table;
};

// A coordinator and its slots, if it has any. The destructor waits for the threads without Python's
// lock, because they may be in a hook.
class StepCoordinator {
 public:
  StepCoordinator(Layers layers, int num_threads, const std::string& isa)
      : layers_(layers), coordinator_(std::make_unique<Coordinator>(layers, num_threads, isa)) {}
  ~StepCoordinator() { close(); }

  Coordinator& get() {
    if (!coordinator_) throw std::invalid_argument("the coordinator has been closed");
    return *coordinator_;
  }
  const Layers& layers() const { return layers_; }

  void close() {
    const nanobind::gil_scoped_release release;
    coordinator_.reset();  // first, because its thread submits copies
    copying_.reset();
  }

  void set_hook(const nanobind::object& hook) {
    hook_ = hook;
    get().set_hook(calling<std::int64_t>(hook));
  }

  // `slots` may be a GPU's memory. It has one address per slot, each of `slot_bytes` bytes.
  void manage_slots(const Tensor& entries, const std::vector<std::uintptr_t>& slots,
                    std::int64_t slot_bytes, StepPolicy* policy, double bytes_per_second,
                    const nanobind::object& before_copy, const DriverLink* link) {
    const auto num_layers = static_cast<std::int64_t>(layers_.size());
    entries.require_dims("entries", 2);
    auto* table = entries.dense<std::int64_t>("entries", num_layers * entries.size(1));
    for (const RoutedLayer& layer : layers_)
      require(layer.expert_bytes <= slot_bytes && layer.num_experts <= entries.size(1),
              "slots and entries for all experts");
    for (const std::uintptr_t slot : slots) require(slot != 0, "slot addresses other than 0");
    get().set_decisions(nullptr);
    {
      const nanobind::gil_scoped_release release;
      copying_.reset();
    }
    before_copy_ = before_copy;
    num_slots_ = static_cast<std::int32_t>(slots.size());
    num_experts_ = entries.size(1);
    entries_ = table;
    std::vector<std::uint8_t*> memory;
    for (const std::uintptr_t slot : slots) memory.push_back(reinterpret_cast<std::uint8_t*>(slot));
    std::unique_ptr<CopyEngine> engine = std::make_unique<HostCopyEngine>(calling<>(before_copy));
    if (link != nullptr) engine = std::make_unique<DriverCopyEngine>(link->driver, link->table);
    copying_ = std::make_unique<CopyingThread>(std::move(engine), layers_, entries_, num_experts_,
                                               std::move(memory), bytes_per_second);
    auto decisions = std::make_unique<StepDecisions>(policy, *copying_);
    decisions_ = decisions.get();
    get().set_decisions(std::move(decisions));
  }

  CopyingThread& copying() {
    if (!copying_) throw std::invalid_argument("the coordinator has no slots");
    return *copying_;
  }
  std::int64_t num_experts() const { return num_experts_; }
  StepDecisions& decisions() {
    copying();
    return *decisions_;
  }

  void clear(const std::vector<std::int64_t>& keys) {
    for (const std::int64_t key : keys)
      require(key >= 0 && key < num_experts_ * static_cast<std::int64_t>(layers_.size()),
              "keys of experts");
    copying().clear(keys);
  }

  void submit(const std::vector<CopyTuple>& copies) {
    std::vector<SlotCopy> found;
    for (const auto& [layer, expert, slot, victim] : copies) {
      const auto at = static_cast<std::size_t>(layer);
      if (layer < 0 || at >= layers_.size() || expert < 0 || expert >= layers_[at].num_experts ||
          slot < 0 || slot >= num_slots_ || victim >= num_experts_)
        throw std::invalid_argument("a copy of expert " + std::to_string(expert) + " of layer " +
                                    std::to_string(layer) + " into slot " + std::to_string(slot) +
                                    ", expected an existing expert, layer and slot");
      found.push_back({layer, expert, slot, victim});
    }
    copying().submit(found);
  }

  // Clears entries in the host's table; called before a launch.
  void clear_entries() {
    for (const std::int64_t key : copying().take_cleared())
      __atomic_store_n(entries_ + key, std::int64_t{0}, __ATOMIC_RELEASE);
  }

 private:
  Layers layers_;
  nanobind::object hook_ = nanobind::none(), before_copy_ = nanobind::none();
  std::unique_ptr<CopyingThread> copying_;
  std::unique_ptr<Coordinator> coordinator_;
  StepDecisions* decisions_ = nullptr;  // owned by the coordinator
  std::int64_t* entries_ = nullptr;
  std::int64_t num_experts_ = 0;
  std::int32_t num_slots_ = 0;
};

}  // namespace tandem
