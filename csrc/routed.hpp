// Computes a layer's experts directly from the router's choice: sorts, computes and sums in one
// call.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "dense.hpp"
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
  std::int64_t stride_bytes;  // between experts
  // Null: all experts are in memory. Otherwise they come from this source, as those of layer
  // `number`.
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

// Computes the experts of a layer with a source as they arrive. `begin` requests them. The engine
// belongs to the caller from then until the end of `finish`.
class ComingExperts {
 public:
  explicit ComingExperts(ExpertEngine& engine) : engine_(engine) {}
  ~ComingExperts() { end(); }
  ComingExperts(const ComingExperts&) = delete;
  ComingExperts& operator=(const ComingExperts&) = delete;

  // `experts` has the numbers; `call` has everything but addresses and must live until the end.
  void begin(const RoutedLayer& layer, const ExpertCall& call, const std::vector<std::int32_t>& experts);
  void finish();  // throws DiskError; then nothing is under way

 private:
  void end() noexcept;

  ExpertEngine& engine_;
  RoutedLayer layer_{};
  ExpertCall call_{};
  bool is_under_way_ = false;
  std::vector<std::int32_t> tokens_, last_;
  std::vector<std::int32_t> begin_, token_, out_begin_;  // of those that have arrived
  std::vector<const std::uint8_t*> addresses_;
};

// Uses the threads of an expert engine, which must outlive it and be idle.
class RoutedExperts {
 public:
  explicit RoutedExperts(ExpertEngine& engine) : engine_(engine), dense_(engine), coming_(engine) {}

  // Returns the number of computed experts.
  std::int64_t run(const RoutedLayer& layer, const RoutedCall& call);
  std::mutex& busy() { return engine_.busy(); }

 private:
  using Part = std::function<void(std::int64_t begin, std::int64_t end)>;  // of the tokens

  void each_part(std::int64_t num_tokens, const Part& part);
  std::int64_t sort_rows(const RoutedLayer& layer, const RoutedCall& call);

  ExpertEngine& engine_;
  DenseEngine dense_;
  ComingExperts coming_;
  std::vector<std::int32_t> active_, count_, begin_, token_, row_of_;
  std::vector<const std::uint8_t*> addresses_;
  std::vector<float> hidden_, weights_, rows_, sums_;
};

}  // namespace tandem
