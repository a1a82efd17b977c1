// The Python bindings of the calls that the hybrid runtime makes for each layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "bindings_tensor.hpp"
#include "routed.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

// Computes some experts of a layer, given by number or address, with an engine's workers while the
// caller does other work. Expert i has rows begin[i]..begin[i + 1] - 1 of a call of `num_rows`
// rows, whose results go to `out`; row_token has this batch's tokens. From construction until
// `finish`, which the same thread must call, the engine is locked and the tensors must stay alive.
//
// The workers read only tokens of this batch's rows: threads of another pool would disturb them,
// and most tokens of a long prompt may have no row here.
class StartedBatch {
 public:
  StartedBatch(ExpertEngine& engine, const RoutedLayer& layer,
               const std::vector<std::uintptr_t>& experts, bool are_addresses,
               std::vector<std::int32_t> begin, const Tensor& row_token, std::int64_t first_token,
               const Tensor& hidden, const Tensor& out)
      : engine_(engine), coming_(engine), begin_(std::move(begin)) {
    const std::int64_t num_rows = out.size(0), num_tokens = hidden.size(0);
    const std::int64_t size = layer.layout.hidden_size, all_tokens = row_token.count();
    const ValueType type = hidden.token_type("hidden");
    const void* given = hidden.values("hidden", type, num_tokens * size);
    auto* rows = out.dense<float>("out", num_rows * size);
    const auto* tokens = row_token.dense<const std::int32_t>("row_token", all_tokens);
    if (begin_.size() != experts.size() + 1 || begin_.front() < 0 || begin_.back() > num_rows)
      throw std::invalid_argument("begin has " + std::to_string(begin_.size()) + " entries for " +
                                  std::to_string(experts.size()) +
                                  " experts, expected one more than experts, each from 0 to " +
                                  std::to_string(num_rows));
    addresses_.reserve(experts.size());
    for (const std::uintptr_t expert : experts) {
      if (!are_addresses && expert >= static_cast<std::uintptr_t>(layer.num_experts))
        throw std::invalid_argument("expert " + std::to_string(expert) + ", expected 0 to " +
                                    std::to_string(layer.num_experts - 1));
      addresses_.push_back(are_addresses ? expert_at(expert)
                                         : layer.expert(static_cast<std::int64_t>(expert)));
    }
    const std::int32_t first = begin_.front();
    for (std::int32_t& row : begin_) row -= first;
    ExpertCall call{static_cast<std::int64_t>(experts.size()),
                    num_tokens,
                    addresses_.data(),
                    begin_.data(),
                    tokens + first_token,
                    nullptr,
                    rows + first * size};
    require(first_token >= 0 && first_token <= all_tokens - begin_.back(), "a token for each row");
    require_in_range(call, begin_.back());
    const nb::gil_scoped_release release;
    turn_ = std::unique_lock(engine.busy());
    number_tokens(call);
    hidden_ = std::make_unique_for_overwrite<float[]>(used_.size() * size);
    engine.load_rows(given, type, size, used_, hidden_.get());
    call.num_tokens = static_cast<std::int64_t>(used_.size());
    call.row_token = row_token_.data();
    call.hidden = hidden_.get();
    if (layer.source != nullptr && !are_addresses) {
      is_coming_ = true;
      coming_.begin(layer, call, {experts.begin(), experts.end()});
    } else {
      engine.start(layer.layout, layer.activation, call);
    }
  }
  StartedBatch(const StartedBatch&) = delete;
  StartedBatch& operator=(const StartedBatch&) = delete;
  ~StartedBatch() {
    if (!is_coming_) finish();
  }

  // Joins the workers and returns when everything is computed.
  void finish() {
    if (!turn_.owns_lock()) return;
    const nb::gil_scoped_release release;
    const std::unique_lock turn = std::move(turn_);
    if (is_coming_)
      coming_.finish();
    else
      engine_.finish();
  }

 private:
  // Numbers the tokens that have rows, in the order of their first rows.
  void number_tokens(const ExpertCall& call) {
    std::vector<std::int32_t> number(call.num_tokens, -1);
    row_token_.reserve(begin_.back());
    for (std::int32_t row = 0; row < begin_.back(); ++row) {
      std::int32_t& place = number[call.row_token[row]];
      if (place < 0) {
        place = static_cast<std::int32_t>(used_.size());
        used_.push_back(call.row_token[row]);
      }
      row_token_.push_back(place);
    }
  }

  ExpertEngine& engine_;
  std::unique_lock<std::mutex> turn_;  // destroyed last
  ComingExperts coming_;
  bool is_coming_ = false;
  std::vector<const std::uint8_t*> addresses_;
  std::vector<std::int32_t> begin_, row_token_, used_;
  std::unique_ptr<float[]> hidden_;  // of the used tokens
};

}  // namespace

void bind_runtime(nb::module_& m) {
  nb::class_<StartedBatch>(m, "StartedBatch")
      .def(nb::init<ExpertEngine&, const RoutedLayer&, const std::vector<std::uintptr_t>&, bool,
                    std::vector<std::int32_t>, const Tensor&, std::int64_t, const Tensor&,
                    const Tensor&>(),
           nb::keep_alive<1, 2>())
      .def("finish", &StartedBatch::finish);
  bind_decider(m);
}

}  // namespace tandem
