// Predicts which experts the next layer uses: runs its router on this layer's router input plus the
// mean difference between the two routers' inputs (DALI, equations 10 and 11).
#pragma once

#include <cstdint>
#include <vector>

#include "dense.hpp"
#include "expert_source.hpp"
#include "policy_tables.hpp"

namespace tandem {

// Chooses the largest values of scoring(matrix @ input) + bias.
struct AheadRouter {
  enum class Scoring : int { kNone = 0, kSigmoid = 1, kSqrtSoftplus = 2 };

  const DenseMatrix* matrix;  // null: nothing is predicted for this layer
  std::vector<float> bias;  // by expert; empty: none
  Scoring scoring;
};

class LookAhead {
 public:
  // One router for each layer; the matrices must outlive this and have `hidden_size` columns.
  LookAhead(std::vector<AheadRouter> routers, std::int64_t hidden_size);

  std::size_t num_layers() const { return routers_.size(); }
  std::int64_t hidden_size() const { return hidden_size_; }
  // 0: the layer has no router.
  std::int64_t num_experts(std::size_t layer) const {
    const DenseMatrix* matrix = routers_[layer].matrix;
    return matrix == nullptr ? 0 : matrix->rows;
  }

  // Learns how a layer's inputs differ from those of the layer before; of a prompt's, from the last.
  void learn(const RouterInputs& inputs);

  // Returns the experts of the layer after `inputs.layer`, (num_tokens, top_k), each token's best
  // first; empty: it has no router.
  Ids predict(DenseEngine& engine, const RouterInputs& inputs);

 private:
  std::vector<AheadRouter> routers_;
  std::int64_t hidden_size_;
  std::vector<std::vector<float>> residuals_;  // by layer: the next layer's inputs - its own, mean
  std::vector<std::int64_t> num_learned_;  // tokens
  std::int32_t last_layer_ = -1;
  std::vector<float> last_, moved_, scores_;
  Ids order_;
};

}  // namespace tandem
