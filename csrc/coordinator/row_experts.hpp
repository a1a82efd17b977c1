// Computes some routed tokens of a layer, each with the address of its expert, into the rows that a
// decode step combines: row `token * top_k + k`. These are the misses on the host, or the hits on a
// CPU twin.
#pragma once

#include <cstdint>
#include <vector>

#include "experts.hpp"
#include "values.hpp"

namespace tandem {

struct RowCall {
  std::int64_t num_tokens, top_k;
  const std::uint8_t* const* experts;  // (num_tokens * top_k); null: not computed
  ValueType type;
  const void* hidden;  // (num_tokens, hidden_size)
  float* out;  // (num_tokens * top_k, hidden_size); rows that are not computed keep their content
};

// Uses the threads of an expert engine, which must outlive it. The caller holds `busy`.
class RowExperts {
 public:
  explicit RowExperts(ExpertEngine& engine) : engine_(engine) {}

  // Returns the number of computed experts.
  std::int64_t run(const ExpertLayout& layout, const ActivationSpec& activation,
                   const RowCall& call);

  // When work on the last call's experts began and ended, by the steady clock.
  double begun() const { return begun_; }
  double ended() const { return ended_; }

 private:
  void compute(const ExpertLayout& layout, const ActivationSpec& activation,
               const ExpertCall& call);
  void sort(const RowCall& call);
  void spread(const RowCall& call, std::int64_t size) const;

  ExpertEngine& engine_;
  std::vector<const std::uint8_t*> addresses_;
  std::vector<std::int32_t> order_, begin_, token_;  // order_: rows of `out`, sorted by expert
  std::vector<float> hidden_, rows_;
  double begun_ = 0.0, ended_ = 0.0;
};

}  // namespace tandem
