// The link from host memory to slots, as the copying thread uses it: operations that happen in the
// order in which they are queued. Every call may block, for instance until a captured step ends.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

namespace tandem {

class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  // Queues a copy of a part of an expert.
  virtual void copy(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) = 0;

  // Queues a copy of a part of an expert from a device.
  virtual void copy_back(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) = 0;

  // Queues: a device that has a table of its own learns that the expert lies here, if it can be
  // told while a step runs. The host's table says so once all of it has happened.
  virtual void publish(std::int64_t key, std::int64_t address) = 0;

  // Returns when at most so many of the queued operations have not happened.
  virtual void wait(std::int64_t most_left) = 0;

  // Operations that have been queued, and those of them that are known to have happened.
  virtual std::int64_t num_queued() const = 0;
  virtual std::int64_t num_happened() const = 0;
};

// Slots in the host's memory, as a CPU twin has them: every call does at once what it queues.
// `before` is called ahead of each: tests let it be late, block or throw.
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
