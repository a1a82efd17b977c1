// Words in memory that another processor also reads and writes: a GPU, or the thread of a CPU twin.
// They use the compiler's builtins, because this memory cannot be declared as atomic.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <thread>
#endif

namespace tandem {

// Seconds of the steady clock, which is also Python's time.perf_counter.
inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename Word>
Word load_acquire(const Word* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

template <typename Word>
void store_release(Word* word, Word value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

// Sets a word from 1 to 0; returns whether it was 1. Of several threads that try, one succeeds.
inline bool take(std::uint32_t* word) {
  if (load_acquire(word) != 1) return false;
  std::uint32_t wanted = 1;
  return __atomic_compare_exchange_n(word, &wanted, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

// Tells the processor that this is a spin loop.
inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace tandem
