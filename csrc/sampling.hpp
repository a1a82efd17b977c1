// Chooses the next token from the scores of a whole vocabulary. Nothing is sorted: a cut is a least
// weight, found by halving, and every pass reads the scores once.
#pragma once

#include <cstdint>
#include <string>

#include "values.hpp"

namespace tandem {

// What is done to the scores, in this order; tandem.generate.sampling.SamplingRule with its None's
// as values that change nothing. Equal scores stay or go together.
struct SamplingRule {
  float repetition_penalty;  // 1: none
  float temperature;         // 0: the best token, and nothing of what follows
  std::int64_t top_k;        // 0: all
  float top_p;               // 1: all
  float min_p;               // 0: all
};

struct TokenScores {
  ValueType type;
  const void* logits;  // (vocabulary,)
  std::int64_t vocabulary;
  const std::int64_t* seen;  // distinct tokens, which the penalty is for
  std::int64_t num_seen;
};

// What lies above some value.
struct Above {
  std::int64_t count;
  double sum;
};

// Passes over values, whole blocks of them: what is missing is padded with -infinity or zeros.
constexpr std::int64_t kSamplingBlock = 256;

struct SamplingKernel {
  float (*greatest)(const float* values, std::int64_t count);  // NaN is never the greatest
  // The first place of a value, or `count`.
  std::int64_t (*find)(const float* values, std::int64_t count, float value);
  Above (*above)(const float* values, std::int64_t count, float pivot);
  // Writes those above `low` and up to `high`; returns their number. `to` may be `values`; a
  // register more than that number is written.
  std::int64_t (*collect)(const float* values, std::int64_t count, float low, float high, float* to);
  // weights = e^((score - greatest) * factor), zero below `least` and where it would be too small;
  // `sums` are those of the blocks.
  void (*weigh)(const float* scores, std::int64_t count, float least, float greatest, float factor,
                float* weights, float* sums);
  // The blocks' sums of weights from `least` on.
  void (*add_up)(const float* weights, std::int64_t count, float least, float* sums);
};

const SamplingKernel& portable_sampling();
#if defined(__x86_64__)
const SamplingKernel& avx2_sampling();
const SamplingKernel& avx512_sampling();
#endif

// Returns a token; `uniform` in [0, 1) decides among those that are left. Scores that are no numbers
// are never chosen while there are others. `isa` names kernels as ExpertEngine::isa does; "" is the
// best that this processor has.
class TokenSampler {
 public:
  explicit TokenSampler(const std::string& isa);
  std::int64_t choose(const SamplingRule& rule, const TokenScores& scores, double uniform) const;

 private:
  const SamplingKernel& kernel_;
};

}  // namespace tandem
