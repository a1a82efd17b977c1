// Chooses the next token from the scores of a whole vocabulary. Nothing is sorted: a cut is a least
// weight, which is found by halving, and every pass reads the scores once.
#pragma once

#include <cstdint>
#include <string>

#include "values.hpp"

namespace tandem {

// The changes of scores, in this order. Same as tandem.generate.sampling.SamplingRule, with neutral
// values for None. Equal scores stay or go together.
struct SamplingRule {
  float repetition_penalty;  // 1: no penalty
  float temperature;  // 0: the best token; all other settings are ignored
  std::int64_t top_k;  // 0: all
  float top_p;  // 1: all
  float min_p;  // 0: all
};

struct TokenScores {
  ValueType type;
  const void* logits;  // (vocabulary,)
  std::int64_t vocabulary;
  const std::int64_t* seen;  // distinct tokens to which the penalty applies
  std::int64_t num_seen;
};

// Number and sum of the values above some value.
struct Above {
  std::int64_t count;
  double sum;
};

// Passes read whole blocks of values, padded with -infinity or zeros.
constexpr std::int64_t kSamplingBlock = 256;

struct SamplingKernel {
  float (*greatest)(const float* values, std::int64_t count);  // ignores NaN
  // The index of the first such value, or `count`.
  std::int64_t (*find)(const float* values, std::int64_t count, float value);
  Above (*above)(const float* values, std::int64_t count, float pivot);
  // Writes the values above `low` and up to `high`; returns their number. `to` may be `values`; up
  // to one more register is written.
  std::int64_t (*collect)(const float* values, std::int64_t count, float low, float high, float* to);
  // weights = e^((score - greatest) * factor); zero below `least`, and if it would be too small.
  // `sums` are those of the blocks.
  void (*weigh)(const float* scores, std::int64_t count, float least, float greatest, float factor,
                float* weights, float* sums);
  // Sums weights of at least `least` by block.
  void (*add_up)(const float* weights, std::int64_t count, float least, float* sums);
};

const SamplingKernel& portable_sampling();
#if defined(__x86_64__)
const SamplingKernel& avx2_sampling();
const SamplingKernel& avx512_sampling();
#endif

// Returns a token; `uniform` in [0, 1) decides among those that are left. NaN scores are chosen
// only if there are no others. `isa` names kernels as in ExpertEngine::isa; "" is the best one of
// this processor.
class TokenSampler {
 public:
  explicit TokenSampler(const std::string& isa);
  std::int64_t choose(const SamplingRule& rule, const TokenScores& scores, double uniform) const;

 private:
  const SamplingKernel& kernel_;
};

}  // namespace tandem
