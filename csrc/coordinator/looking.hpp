// Waiting for a word that another thread sets within microseconds.
#pragma once

#include <thread>

#include "coordinator/words.hpp"

namespace tandem {

// A thread spins on a doorbell for this long. After that it yields between looks, which costs
// nothing if no other thread waits for the core. If the device itself waits for it (a CPU twin on a
// busy machine), spinning for 500 microseconds delayed each layer by 500.
constexpr double kSpinSeconds = 1e-5;
constexpr int kSpins = 64;  // between two looks at the clock

// Called between two looks at a word.
class BetweenLooks {
 public:
  void operator()() {
    if (++spin_ % kSpins == 0) is_patient_ = is_patient_ && steady_seconds() < end_;
    if (is_patient_) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }

 private:
  const double end_ = steady_seconds() + kSpinSeconds;
  int spin_ = 0;
  bool is_patient_ = true;
};

}  // namespace tandem
