// Copies to a GPU through its driver, whose library is loaded at first use, so no build needs CUDA.
// The versions of functions are those of CUDA 12 (see driver.py).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/copy_engine.hpp"

namespace tandem {

// The driver's functions, and the context that was current at construction, which must be that of
// the thread that uses the GPU. Throws std::runtime_error with a sentence for what is missing. The
// library stays loaded, because torch uses it too.
class Driver {
 public:
  explicit Driver(const std::string& library);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  using Handle = void*;
  using Address = std::uint64_t;
  int (*context_set_current)(Handle);
  int (*stream_create)(Handle*, unsigned flags, int priority);
  int (*stream_destroy)(Handle);
  int (*stream_synchronize)(Handle);
  int (*event_create)(Handle*, unsigned flags);
  int (*event_destroy)(Handle);
  int (*event_record)(Handle, Handle stream);
  int (*event_synchronize)(Handle);
  int (*copy_to_device)(Address, const void*, std::size_t, Handle stream);
  int (*copy_to_host)(void*, Address, std::size_t, Handle stream);
  int (*write_value)(Handle stream, Address, std::uint64_t, unsigned flags);  // may be null

  Handle context() const { return context_; }
  void require(int code, const char* what) const;  // throws the driver's message for an error code

 private:
  template <typename Function>
  void find(Function& function, const char* name, bool is_needed = true);

  void* library_;
  int (*get_address_)(const char*, void**, int, std::uint64_t, void*);
  int (*error_string_)(int, const char**) = nullptr;
  Handle context_ = nullptr;
};

// Has its own stream of the lowest priority. One thread makes all calls.
class DriverCopyEngine : public CopyEngine {
 public:
  // `table` is the address of the device's table, with one entry per key.
  DriverCopyEngine(std::shared_ptr<Driver> driver, std::uint64_t table);
  ~DriverCopyEngine() override;
  DriverCopyEngine(const DriverCopyEngine&) = delete;
  DriverCopyEngine& operator=(const DriverCopyEngine&) = delete;

  void copy(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) override;
  void copy_back(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) override;
  void publish(std::int64_t key, std::int64_t address) override;
  void wait(std::int64_t most_left) override;
  std::int64_t num_queued() const override { return num_queued_; }
  std::int64_t num_happened() const override {
    return num_queued_ - static_cast<std::int64_t>(queued_.size());
  }

 private:
  void enter();
  void note_queued();

  const std::shared_ptr<Driver> driver_;
  const std::uint64_t table_;
  bool can_write_, has_entered_ = false;
  Driver::Handle stream_ = nullptr;
  std::deque<Driver::Handle> queued_;  // an event after each operation
  std::int64_t num_queued_ = 0;
  std::vector<Driver::Handle> spare_;
};

}  // namespace tandem
