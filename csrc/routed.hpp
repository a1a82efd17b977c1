// A layer's experts straight from the router's choice: sorting, computing and adding up in one call.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "expert_source.hpp"
#include "experts.hpp"
#include "values.hpp"

namespace tandem {

struct RoutedLayer {
  ExpertLayout layout;
  ActivationSpec activation;
  std::int64_t num_experts;
  const std::uint8_t* experts;
  std::int64_t expert_bytes;
  std::int64_t stride_bytes;  // from one expert to the next
  // Null: all lie in memory. Else they come from there, as those of layer `number`.
  ExpertSource* source = nullptr;
  std::int32_t number = 0;

  const std::uint8_t* expert(std::int64_t place) const { return experts + place * stride_bytes; }
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

// Experts of a layer that has a source, computed as they come. They are asked for by `begin`; the
// engine is the caller's from there to the end of `finish`.
class ComingExperts {
 public:
  explicit ComingExperts(ExpertEngine& engine) : engine_(engine) {}
  ~ComingExperts() { end(); }
  ComingExperts(const ComingExperts&) = delete;
  ComingExperts& operator=(const ComingExperts&) = delete;

  // `experts` has the numbers; `call` all but their addresses, and lives until the end.
  void begin(const RoutedLayer& layer, const ExpertCall& call, const std::vector<std::int32_t>& experts);
  void finish();  // throws DiskError; nothing is under way then

 private:
  void end() noexcept;

  ExpertEngine& engine_;
  RoutedLayer layer_{};
  ExpertCall call_{};
  bool is_under_way_ = false;
  std::vector<std::int32_t> tokens_, last_;
  std::vector<std::int32_t> begin_, token_, out_begin_;  // of those that have come
  std::vector<const std::uint8_t*> addresses_;
};

// Works with the threads of an expert engine, which must outlive it and be idle.
class RoutedExperts {
 public:
  explicit RoutedExperts(ExpertEngine& engine) : engine_(engine), coming_(engine) {}

  // Returns the number of experts that were computed.
  std::int64_t run(const RoutedLayer& layer, const RoutedCall& call);
  std::mutex& busy() { return engine_.busy(); }

 private:
  using Part = std::function<void(std::int64_t begin, std::int64_t end)>;  // of the tokens

  void each_part(std::int64_t num_tokens, const Part& part);
  std::int64_t sort_rows(const RoutedLayer& layer, const RoutedCall& call);

  ExpertEngine& engine_;
  ComingExperts coming_;
  std::vector<std::int32_t> active_, count_, begin_, token_, row_of_;
  std::vector<const std::uint8_t*> addresses_;
  std::vector<float> hidden_, weights_, rows_, sums_;
};

}  // namespace tandem
