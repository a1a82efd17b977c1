// Some routed tokens of a layer, each with the address of its expert, computed into the rows that
// the combine of a decode step reads: row `token * top_k + k`. The misses on the host, the hits on
// a CPU twin.
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
  float* out;          // (num_tokens * top_k, hidden_size); rows that are not computed stay
};

// Works with the threads of an expert engine, which must outlive it; the caller holds its `busy`.
class RowExperts {
 public:
  explicit RowExperts(ExpertEngine& engine) : engine_(engine) {}

  // Returns the number of experts that were computed.
  std::int64_t run(const ExpertLayout& layout, const ActivationSpec& activation,
                   const RowCall& call);

  // When the threads began and ended the last call's experts, by the steady clock.
  double begun() const { return begun_; }
  double ended() const { return ended_; }

 private:
  void compute(const ExpertLayout& layout, const ActivationSpec& activation,
               const ExpertCall& call);
  void sort(const RowCall& call);
  void spread(const RowCall& call, std::int64_t size) const;

  ExpertEngine& engine_;
  std::vector<const std::uint8_t*> addresses_;
  std::vector<std::int32_t> order_, begin_, token_;  // order: the rows of out, expert by expert
  std::vector<float> hidden_, rows_;
  double begun_ = 0.0, ended_ = 0.0;
};

}  // namespace tandem
