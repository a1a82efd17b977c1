// The link from host memory to slots, as the copying thread uses it: operations that happen in the
// order in which they are queued. Every call may block, for instance until a captured step ends.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>

#include "coordinator/words.hpp"

namespace tandem {

class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  // Queues a copy of a part of an expert.
  virtual void copy(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) = 0;

  // Queues: the device's table says from then on that the expert lies here.
  virtual void publish(std::int64_t* entry, std::int64_t address) = 0;

  // Returns when at most so many of the queued operations have not happened.
  virtual void wait(std::int64_t most_left) = 0;
};

// Slots and table in the host's memory, as a CPU twin has them: every call does at once what it
// queues, at a settable bandwidth (0: as fast as the memory is). `before` is called ahead of each:
// tests let it be late, block or throw.
class HostCopyEngine : public CopyEngine {
 public:
  explicit HostCopyEngine(std::function<void()> before = nullptr, double bytes_per_second = 0.0)
      : before_(std::move(before)), bytes_per_second_(bytes_per_second) {}

  void copy(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) override {
    if (before_) before_();
    const double begin = steady_seconds();
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    if (bytes_per_second_ <= 0.0) return;
    behind_ += static_cast<double>(bytes) / bytes_per_second_ - (steady_seconds() - begin);
    if (behind_ < kShortestSleep) return;
    std::this_thread::sleep_for(std::chrono::duration<double>(behind_));
    behind_ = 0.0;
  }
  void publish(std::int64_t* entry, std::int64_t address) override {
    if (before_) before_();
    store_release(entry, address);
  }
  void wait(std::int64_t) override {}

 private:
  static constexpr double kShortestSleep = 1e-4;  // the system does not keep shorter ones

  std::function<void()> before_;
  const double bytes_per_second_;
  double behind_ = 0.0;
};

}  // namespace tandem
