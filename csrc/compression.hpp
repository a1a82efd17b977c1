// Window compression: one key for every `ratio` tokens of a sequence. Each value of the key is a
// sum over the window, weighted by a softmax of its own. Unfinished windows are kept as a slot's
// state.
#pragma once

#include <cstdint>

#include "recurrent.hpp"
#include "thread_pool.hpp"
#include "values.hpp"

namespace tandem {

// The token that ends a window brings its key; other tokens bring zeros. With one series, the key
// is made of the window's own tokens. With two, the first series belongs to the previous window and
// the second to its own. A slot stores its last tokens by position. It stores more than a key
// needs, so that tokens may be taken back.
struct WindowCompression {
  std::int64_t ratio, dim, num_series;
  const float* bias;  // (ratio, num_series * dim), for gates by position in the window
  float* states;  // (slots, kept, 2, num_series * dim): values, and gates including their bias
  std::int64_t num_kept, num_slots;

  StateTokens tokens;
  ValueType type;  // of values, gates and out
  const void* values;  // (tokens, num_series * dim); `value_stride` values between tokens
  const void* gates;
  std::int64_t value_stride, gate_stride;
  void* out;             // (tokens, dim)

  std::int64_t width() const { return num_series * dim; }
  // Tokens that contribute to a key.
  std::int64_t span() const { return num_series * ratio; }
  bool ends_window(std::int64_t position) const { return (position + 1) % ratio == 0; }
};

class CompressionEngine {
 public:
  explicit CompressionEngine(ThreadPool& pool) : pool_(pool) {}

  // Throws std::invalid_argument for a slot that does not exist.
  void run(const WindowCompression& call);

 private:
  ThreadPool& pool_;
};

}  // namespace tandem
