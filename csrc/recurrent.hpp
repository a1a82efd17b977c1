// Layers with a state from token to token instead of keys and values: short convolutions and linear
// recurrences (gated delta rule, Kimi's delta attention, Mamba, Mamba-2, lightning attention). A
// call has the tokens of several sequences one after the other; each sequence's state is in a slot.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "thread_pool.hpp"
#include "values.hpp"

namespace tandem {

constexpr std::int64_t kStateBlock = 16;  // values of a head whose states are adjacent
constexpr std::int64_t kMostKeyDim = 512;
constexpr std::int64_t kMostWidth = 16;  // taps of a convolution

// The tokens of a call. Those of one slot are consecutive, in the order of their positions, and
// continue where the slot's state ended. Before position 0 a state is zero.
struct StateTokens {
  std::int64_t count;
  const std::int64_t* slots;
  const std::int64_t* positions;
  bool have_drafts;  // all but a slot's first token may be taken back
};

constexpr std::int64_t kMostDrafted = 7;  // per slot, in one call

// A state excludes drafted tokens. A slot's log has what is needed to repeat them, and the slot's
// next call repeats those that were accepted. So drafts need no copy of a state.
struct DraftLog {
  std::int64_t* kept;  // (slots,): how many of the logged tokens precede the slot's next ones
  float* values;  // (slots, kMostDrafted, values of a token)
  std::int64_t num_slots = INT64_MAX;  // also for the states; tokens of other slots are refused
};

// A convolution over the last `width` inputs of each channel, with silu if requested.
struct ShortConvolution {
  std::int64_t channels, width;
  const float* weight;  // (width, channels), the oldest input's weights first
  const float* bias;  // (channels,) or null
  bool has_silu;
  float* states;         // (slots, width - 1, channels): the inputs before the next one
  DraftLog log;          // of inputs

  StateTokens tokens;
  ValueType type;  // of input and out
  const void* input;  // (tokens, channels), `token_stride` values between tokens
  std::int64_t token_stride;
  void* out;             // (tokens, channels)
};

// (tokens, heads, dim), contiguous in the last dimension.
struct HeadView {
  const void* data;
  std::int64_t token_stride, head_stride;
};

// How a state decays: the whole state of a head alike, by key, or by key and value.
enum class DecayKind : int { kByHead = 0, kByKey = 1, kByPair = 2 };

// For each token and head, with the state S (key_dim, value_dim):
//   S = e^decay * S;  S += key (x) rate * (value - key S);  out = query S + skip * value
// where `key S` is omitted unless `is_delta`. By pair, the decay is the token's and value's times
// the pair's `factor`. num_heads / num_key_heads heads share a query and a key. If `is_normalised`,
// these are divided by their length; queries are multiplied by `scale`.
struct Recurrence {
  std::int64_t num_heads, num_key_heads, key_dim, value_dim;
  DecayKind decay_kind;
  bool is_delta, is_normalised;
  float scale;
  const float* factor;   // (blocks of values, key_dim, 16) or null
  const float* skip;     // (num_heads, value_dim) or null
  float* states;         // (slots, num_heads, blocks of values, key_dim, 16)
  DraftLog log;

  StateTokens tokens;
  ValueType type;        // of query, key, value and out
  HeadView query, key, value;
  const float* decay;    // (tokens, num_heads), (tokens, num_heads, key_dim), (tokens, value_dim)
  ValueType rate_type;
  const void* rate;  // (tokens, num_heads); null: 1
  void* out;  // (tokens, num_heads, value_dim)

  std::int64_t blocks() const { return (value_dim + kStateBlock - 1) / kStateBlock; }
  std::int64_t kept_by_head() const {
    return decay_kind == DecayKind::kByHead ? 1 : decay_kind == DecayKind::kByKey ? key_dim : 0;
  }
};

// The layout of a token in a recurrence's log.
struct LoggedToken {
  explicit LoggedToken(const Recurrence& call)
      : kept(call.num_key_heads * call.key_dim),
        kept_key(kept + call.num_heads * call.kept_by_head()),
        value(kept_key + (call.decay_kind == DecayKind::kByKey ? kept_key - kept : 0)),
        rate(value + call.num_heads * call.value_dim),
        decay(rate + call.num_heads),
        size(decay + (call.decay_kind == DecayKind::kByPair ? call.value_dim : 0)) {}

  std::int64_t kept, kept_key, value, rate, decay, size;  // offsets; the keys come first
};

// Consecutive tokens of one slot.
struct StateSegment {
  std::int64_t first, count, slot;
  bool is_beginning;  // its first token has position 0
  std::int64_t num_again;  // logged tokens to repeat before them
  std::int64_t num_certain;  // the others are drafted
};

// What all blocks of a recurrence read of a few tokens, in fp32.
struct PreparedTokens {
  std::int64_t first;  // index of the first token
  float* query;  // (tokens, num_key_heads, key_dim)
  float* key;
  float* kept;  // the share of a state that is left: (tokens, num_heads) or, by key, (.., key_dim)
  float* kept_key;  // by key: kept * key, (tokens, num_heads, key_dim)
};

struct RecurrentKernels {
  void (*convolve)(const ShortConvolution& call, const StateSegment& segment,
                   std::int64_t first_channel, std::int64_t num_channels);
  // Prepares one token's queries, keys and decays, in row `t` of the memory in `to`.
  void (*prepare)(const Recurrence& call, const PreparedTokens& to, std::int64_t t);
  // Advances blocks begin .. end - 1 of a head's values over a segment whose tokens are prepared.
  void (*recur)(const Recurrence& call, const PreparedTokens& prepared,
                const StateSegment& segment, std::int64_t head, std::int64_t begin,
                std::int64_t end);
  // Writes a prepared drafted token to the log.
  void (*note)(const Recurrence& call, const PreparedTokens& prepared, std::int64_t token,
               float* logged);
};

const RecurrentKernels& portable_recurrent();
#if defined(__x86_64__)
const RecurrentKernels& avx2_recurrent();
const RecurrentKernels& avx512_recurrent();
#endif

class RecurrentEngine {
 public:
  // `isa` names the kernels as in ExpertEngine::isa.
  RecurrentEngine(ThreadPool& pool, const std::string& isa);

  void run(const ShortConvolution& call);
  void run(const Recurrence& call);

 private:
  // Throws std::invalid_argument for a slot that does not exist, and for an impossible log.
  void cut_into_segments(const StateTokens& tokens, std::int64_t first, std::int64_t count,
                         const DraftLog& log);
  void note_drafts(const Recurrence& call, const PreparedTokens& prepared);
  void settle(const DraftLog& log);
  PreparedTokens prepare(const Recurrence& call, std::int64_t first, std::int64_t count);

  const RecurrentKernels& kernels_;
  ThreadPool& pool_;
  std::vector<StateSegment> segments_;
  std::vector<float> query_, key_, kept_, kept_key_;
};

}  // namespace tandem
