// Layers that carry a state from token to token, in place of keys and values: short convolutions and
// linear recurrences (gated delta rule, Kimi's delta attention, Mamba, Mamba-2, lightning attention).
// The tokens of several sequences stand one after the other; each sequence has its state in a slot.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "thread_pool.hpp"
#include "values.hpp"

namespace tandem {

constexpr std::int64_t kStateBlock = 16;  // values of a head whose states lie side by side
constexpr std::int64_t kMostKeyDim = 512;
constexpr std::int64_t kMostWidth = 16;  // of a convolution

// The tokens of a call. Those of one slot follow each other in the order of their positions, which go
// on where the slot's state stands; a state is zero before position 0.
struct StateTokens {
  std::int64_t count;
  const std::int64_t* slots;
  const std::int64_t* positions;
  bool have_drafts;  // all but the first one of a slot may be taken back
};

constexpr std::int64_t kMostDrafted = 7;  // of a slot, in a call

// A state stands before drafted tokens. What they need to be done again is in their slot's log, and
// the slot's next call does as many of them as were kept. So drafts cost no copy of a state.
struct DraftLog {
  std::int64_t* kept;  // (slots,): how many of the logged tokens the slot's next ones follow
  float* values;       // (slots, kMostDrafted, values of a token)
  std::int64_t num_slots = INT64_MAX;  // of the states too; a token of another one is refused
};

// A convolution over a channel's own last `width` inputs, perhaps with silu.
struct ShortConvolution {
  std::int64_t channels, width;
  const float* weight;   // (width, channels), the oldest input's first
  const float* bias;     // (channels,) or null
  bool has_silu;
  float* states;         // (slots, width - 1, channels): the inputs before the next one
  DraftLog log;          // of inputs

  StateTokens tokens;
  ValueType type;        // of input and out
  const void* input;     // (tokens, channels), tokens `token_stride` values apart
  std::int64_t token_stride;
  void* out;             // (tokens, channels)
};

// (tokens, heads, dim), whose last dimension lies side by side.
struct HeadView {
  const void* data;
  std::int64_t token_stride, head_stride;
};

// What fades: a head's whole state alike, by key, or by key and value.
enum class DecayKind : int { kByHead = 0, kByKey = 1, kByPair = 2 };

// For each token and head, with the state S (key_dim, value_dim):
//   S = e^decay * S;  S += key (x) rate * (value - key S);  out = query S + skip * value
// where `key S` is left out unless `is_delta`. By pair, decay is that of the token and the value times
// `factor` of the pair. Queries and keys belong to num_heads / num_key_heads heads each; they are
// divided by their length if `is_normalised`, and queries multiplied by `scale`.
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
  const void* rate;      // (tokens, num_heads); null: one
  void* out;             // (tokens, num_heads, value_dim)

  std::int64_t blocks() const { return (value_dim + kStateBlock - 1) / kStateBlock; }
  std::int64_t kept_by_head() const {
    return decay_kind == DecayKind::kByHead ? 1 : decay_kind == DecayKind::kByKey ? key_dim : 0;
  }
};

// Where a recurrence's log has what of a token.
struct LoggedToken {
  explicit LoggedToken(const Recurrence& call)
      : kept(call.num_key_heads * call.key_dim),
        kept_key(kept + call.num_heads * call.kept_by_head()),
        value(kept_key + (call.decay_kind == DecayKind::kByKey ? kept_key - kept : 0)),
        rate(value + call.num_heads * call.value_dim),
        decay(rate + call.num_heads),
        size(decay + (call.decay_kind == DecayKind::kByPair ? call.value_dim : 0)) {}

  std::int64_t kept, kept_key, value, rate, decay, size;  // keys lie before them
};

// Neighbouring tokens of one slot.
struct StateSegment {
  std::int64_t first, count, slot;
  bool is_beginning;  // its first token has position 0
  std::int64_t num_again;  // logged tokens that come before
  std::int64_t num_certain;  // the others are drafted
};

// What all blocks of a recurrence read of a few tokens, in fp32.
struct PreparedTokens {
  std::int64_t first;  // token
  float* query;     // (tokens, num_key_heads, key_dim)
  float* key;
  float* kept;      // what is left of a state: (tokens, num_heads) or, by key, (.., key_dim)
  float* kept_key;  // by key: kept * key, (tokens, num_heads, key_dim)
};

struct RecurrentKernels {
  // Some channels of a segment.
  void (*convolve)(const ShortConvolution& call, const StateSegment& segment,
                   std::int64_t first_channel, std::int64_t num_channels);
  // One token's queries, keys and decays, into row `t` of what `to` points at.
  void (*prepare)(const Recurrence& call, const PreparedTokens& to, std::int64_t t);
  // Blocks begin .. end - 1 of a head's values, for a segment whose tokens are prepared.
  void (*recur)(const Recurrence& call, const PreparedTokens& prepared,
                const StateSegment& segment, std::int64_t head, std::int64_t begin,
                std::int64_t end);
  // Writes a drafted token, which is prepared, to the log.
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
  // `isa` names the kernels as ExpertEngine::isa does.
  RecurrentEngine(ThreadPool& pool, const std::string& isa);

  void run(const ShortConvolution& call);
  void run(const Recurrence& call);

 private:
  // Throws std::invalid_argument for a slot that is not there, and for a log that cannot be.
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
