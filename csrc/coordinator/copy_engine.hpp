// The link from host memory to slots, as the copying thread uses it. Operations happen in the order
// in which they are queued. Every call may block, for instance until a captured step ends.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

namespace tandem {

class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  // Queues a copy of a part of an expert to a slot.
  virtual void copy(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) = 0;

  // Queues a copy of a part of an expert from a slot.
  virtual void copy_back(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) = 0;

  // Queues an entry in the device's own table, if it has one that can be written while a step runs.
  // The host's table gets its entry when all of this has happened.
  virtual void publish(std::int64_t key, std::int64_t address) = 0;

  // Returns when at most `most_left` of the queued operations have not happened.
  virtual void wait(std::int64_t most_left) = 0;

  // Operations that have been queued, and those that are known to have happened.
  virtual std::int64_t num_queued() const = 0;
  virtual std::int64_t num_happened() const = 0;
};

// For slots in host memory, as a CPU twin has them: every call takes effect at once. `before` is
// called first; tests use it to delay, block or throw.
class HostCopyEngine : public CopyEngine {
 public:
  explicit HostCopyEngine(std::function<void()> before = nullptr) : before_(std::move(before)) {}

  void copy(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) override {
    if (before_) before_();
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void copy_back(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) override {
    copy(to, from, bytes);
  }
  void publish(std::int64_t, std::int64_t) override {
    if (before_) before_();
  }
  void wait(std::int64_t) override {}
  std::int64_t num_queued() const override { return 0; }
  std::int64_t num_happened() const override { return 0; }

 private:
  std::function<void()> before_;
};

}  // namespace tandem
