// Window compression: of every `ratio` tokens of a sequence one key, a sum that each value's own softmax
// over the window weighs. What unfinished windows need is a slot's state.
#pragma once

#include <cstdint>

#include "recurrent.hpp"
#include "thread_pool.hpp"
#include "values.hpp"

namespace tandem {

// The token that ends a window brings its key: with one series, of the window's own tokens; with two, of
// these by the second series and of the window before by the first. Other tokens bring zeros. A slot keeps
// its last tokens by position, so that tokens may be taken back: as many as are kept beyond the windows.
struct WindowCompression {
  std::int64_t ratio, dim, num_series;
  const float* bias;     // (ratio, num_series * dim), of gates by the place in a window
  float* states;         // (slots, kept, 2, num_series * dim): values, and gates with their bias
  std::int64_t num_kept, num_slots;

  StateTokens tokens;
  ValueType type;        // of values, gates and out
  const void* values;    // (tokens, num_series * dim), tokens so many values apart
  const void* gates;
  std::int64_t value_stride, gate_stride;
  void* out;             // (tokens, dim)

  std::int64_t width() const { return num_series * dim; }
  // Tokens that a key is made of.
  std::int64_t span() const { return num_series * ratio; }
  bool ends_window(std::int64_t position) const { return (position + 1) % ratio == 0; }
};

class CompressionEngine {
 public:
  explicit CompressionEngine(ThreadPool& pool) : pool_(pool) {}

  // Throws std::invalid_argument for a slot that is not there.
  void run(const WindowCompression& call);

 private:
  ThreadPool& pool_;
};

}  // namespace tandem
