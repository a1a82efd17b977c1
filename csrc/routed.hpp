// A layer's experts straight from the router's choice: sorting, computing and adding up in one call.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "experts.hpp"
#include "values.hpp"

namespace tandem {

struct RoutedLayer {
  ExpertLayout layout;
  ActivationSpec activation;
  std::int64_t num_experts;
  const std::uint8_t* experts;  // `expert_bytes` apart
  std::int64_t expert_bytes;
};

struct RoutedCall {
  std::int64_t num_tokens, top_k;
  ValueType type;              // of hidden, weights and out
  const void* hidden;          // (num_tokens, hidden_size)
  const std::int64_t* index;   // (num_tokens, top_k); outside 0..num_experts-1: adds nothing
  ValueType weight_type;
  const void* weights;         // (num_tokens, top_k)
  void* out;                   // (num_tokens, hidden_size)
};

// Works with the threads of an expert engine, which must outlive it and be idle.
class RoutedExperts {
 public:
  explicit RoutedExperts(ExpertEngine& engine) : engine_(engine) {}

  // Returns the number of experts that were computed.
  std::int64_t run(const RoutedLayer& layer, const RoutedCall& call);
  std::mutex& busy() { return engine_.busy(); }

 private:
  using Part = std::function<void(std::int64_t begin, std::int64_t end)>;  // of the tokens

  void each_part(std::int64_t num_tokens, const Part& part);
  std::int64_t sort_rows(const RoutedLayer& layer, const RoutedCall& call);

  ExpertEngine& engine_;
  std::vector<std::int32_t> count_, begin_, token_, row_of_;
  std::vector<const std::uint8_t*> addresses_;
  std::vector<float> hidden_, weights_, rows_, sums_;
};

}  // namespace tandem
