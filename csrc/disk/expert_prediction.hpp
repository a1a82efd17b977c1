// Which absent expert the next layer of a decode step is likeliest to want: it may be read while the
// disk would stand still. Whether to read it is decided by how often that was right, and by what a
// wrong one costs the reads that are waited for.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lone_layer.hpp"
#include "policy_tables.hpp"

namespace tandem {

class ExpertPrediction {
 public:
  // Learns in `tables`, which outlive it; null: predicts nothing.
  ExpertPrediction(ForesightTables* tables, std::int32_t num_layers);

  // A layer is used: by a decode step, of which at least one expert `is_missing`, or by a prompt,
  // of which the last token's experts matter. What was predicted for it is compared.
  void begin(std::int32_t layer, std::span<const std::int32_t> experts, bool is_step,
             bool is_missing);
  // Behind it: the tables learn what `begin` was told.
  void learn();
  // Behind a step's layer: the expert of the next layer (of the first one, of the next step) that is
  // likeliest, of those that `is_absent`; kNobody: none, or none that pays.
  std::int32_t next(const std::function<bool(std::int32_t layer, std::int32_t expert)>& is_absent);
  // The layer that `next` spoke of.
  std::int32_t next_layer() const { return next_; }

  // What a demanded read took.
  void note_read(double seconds);

 private:
  // Averages of the latest uses of a layer.
  struct Averages {
    double right = 0.0, missing = 1.0;  // shares of them
    double idle = 0.0;  // seconds from the end of the layer above to this one
  };

  bool pays(const Averages& layer) const;

  ForesightTables* tables_;
  std::vector<Averages> averages_;
  std::vector<Ids> before_;  // by layer: experts of the step before
  Ids experts_, above_, taught_before_;
  std::int32_t layer_ = -1, next_ = -1, predicted_ = kNobody;
  bool is_taught_ = true, is_step_ = false;
  double ended_ = 0.0, read_ = 0.0;
};

}  // namespace tandem
