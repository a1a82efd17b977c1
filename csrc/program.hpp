// A recorded step's operations, run as one call: only nanoseconds pass between two operations, and
// the threads stay awake from the first to the last.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <variant>
#include <vector>

#include "attention.hpp"
#include "compression.hpp"
#include "dense.hpp"
#include "hyper_connections.hpp"
#include "index_keys.hpp"
#include "recurrent.hpp"
#include "routed.hpp"
#include "rowwise.hpp"
#include "tensor_ops.hpp"

namespace tandem {

// The engines share the threads of one expert engine. They, and all memory used by operations, must
// outlive the program.
class Program {
 public:
  Program(ExpertEngine& experts, DenseEngine& dense, AttentionEngine& attention,
          RoutedExperts& routed, RecurrentEngine& recurrent)
      : rows_(row_kernels(experts.isa())), tensors_(tensor_kernels(experts.isa())), pool_(experts.pool()), dense_(dense),
        attention_(attention), routed_(routed), recurrent_(recurrent), index_(pool_, tensors_), compression_(pool_),
        hyper_(pool_, experts.isa()) {}

  void add(const RmsNorm& call) { steps_.emplace_back(call); }
  void add(const Rotary& call) { steps_.emplace_back(call); }
  void add(const RotaryPairs& call) { steps_.emplace_back(call); }
  void add(const Choice& call) { steps_.emplace_back(call); }
  void add(const RankedChoice& call) { steps_.emplace_back(call); }
  void add(const Elementwise& call) { steps_.emplace_back(call); }
  void add(const Reduction& call) { steps_.emplace_back(call); }
  void add(const Softmax& call) { steps_.emplace_back(call); }
  void add(const LayerNorm& call) { steps_.emplace_back(call); }
  void add(const Greatest& call) { steps_.emplace_back(call); }
  void add(const Lookup& call) { steps_.emplace_back(call); }
  void add(const Scatter& call) { steps_.emplace_back(call); }
  void add(const Product& call) { steps_.emplace_back(call); }
  void add(const IndexSelection& call) { steps_.emplace_back(call); }
  void add(const ShortConvolution& call) { steps_.emplace_back(call); }
  void add(const Recurrence& call) { steps_.emplace_back(call); }
  void add(const WindowCompression& call) { steps_.emplace_back(call); }
  void add(const MixIn& call) { steps_.emplace_back(call); }
  void add(const MixOut& call) { steps_.emplace_back(call); }

  // Same as DenseCall; output m is at outputs[m].
  struct Dense {
    std::vector<const DenseMatrix*> matrices;
    std::vector<void*> outputs;
    std::int64_t num_tokens, in_features;
    ValueType type;
    const void* input;
    std::int64_t token_stride = 0, matrix_stride = 0, out_stride = 0;
  };
  void add(const RowsCall& call) { steps_.emplace_back(call); }
  void add(Dense call) { steps_.emplace_back(std::move(call)); }

  // Appends the new keys and values of `step` and computes attention. Reads the KV cache from
  // `layer` at run time, because it grows.
  struct Attention {
    const AttentionCall* layer;
    AttentionCall step;
  };
  void add(const Attention& call) { steps_.emplace_back(call); }

  // Work of other parts of the runtime, which may use these threads.
  void add(std::function<void()> call) { steps_.emplace_back(std::move(call)); }

  // Returns the index with which `num_active` returns how many experts were computed.
  std::int64_t add(const RoutedLayer& layer, const RoutedCall& call);

  void run();
  std::int64_t num_active(std::int64_t number) const { return num_active_.at(number); }
  std::mutex& busy() { return pool_.busy(); }

 private:
  struct Experts {
    RoutedLayer layer;
    RoutedCall call;
    std::int64_t number;
  };
  using Step = std::variant<RmsNorm, Rotary, RotaryPairs, Choice, RankedChoice, Elementwise,
                            Reduction, Softmax, LayerNorm, Greatest, Lookup, Scatter, Product,
                            IndexSelection, RowsCall,
                            ShortConvolution, Recurrence, WindowCompression, MixIn, MixOut, Dense, Attention, Experts,
                            std::function<void()>>;

  void operator()(const RmsNorm& call);
  void operator()(const Rotary& call);
  void operator()(const RotaryPairs& call);
  void operator()(const Choice& call) { choose(call); }
  void operator()(const RankedChoice& call) { choose(call); }
  void operator()(const Elementwise& call);
  void operator()(const Reduction& call) { by_rows(call, tensors_.reduce); }
  void operator()(const Softmax& call) { by_rows(call, tensors_.softmax); }
  void operator()(const LayerNorm& call) { tensors_.layer_norm(call); }
  void operator()(const Greatest& call) { by_rows(call, tensors_.find_greatest); }
  void operator()(const Lookup& call) { tensors_.look_up(call); }
  void operator()(const Scatter& call) { tensors_.scatter(call); }
  void operator()(const Product& call);
  void operator()(const IndexSelection& call) { index_.run(call); }
  void operator()(const ShortConvolution& call) { recurrent_.run(call); }
  void operator()(const Recurrence& call) { recurrent_.run(call); }
  void operator()(const WindowCompression& call) { compression_.run(call); }
  void operator()(const MixIn& call) { hyper_.run(call); }
  void operator()(const MixOut& call) { hyper_.run(call); }
  void operator()(const RowsCall& call) { dense_.read(call); }
  void operator()(const Dense& call);
  void operator()(const Attention& call);
  void operator()(const Experts& call);
  void operator()(const std::function<void()>& call) { call(); }

  // Distributes the rows of the last dimension among the threads if there are many.
  template <typename Call>
  void by_rows(const Call& call, void (*run)(const Call&));

  const RowKernels& rows_;
  const TensorKernels& tensors_;
  ThreadPool& pool_;
  DenseEngine& dense_;
  AttentionEngine& attention_;
  RoutedExperts& routed_;
  RecurrentEngine& recurrent_;
  IndexEngine index_;
  CompressionEngine compression_;
  HyperEngine hyper_;
  std::vector<Step> steps_;
  std::vector<std::int64_t> num_active_;
};

}  // namespace tandem
