// How a thread waits for a word that another one sets within microseconds.
#pragma once

#include <thread>

#include "coordinator/words.hpp"

namespace tandem {

// For so long a thread keeps its processor while it looks at a doorbell. Then it gives way between
// looks: that costs nothing where no other thread waits for the processor; where the device itself
// does (a CPU twin on a busy machine), 500 microseconds of spinning were 500 for each layer.
constexpr double kSpinSeconds = 1e-5;
constexpr int kSpins = 64;  // between two looks at the clock

// What a thread does between two looks at a word.
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
