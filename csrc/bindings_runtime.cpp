// What Python sees of the calls that the hybrid runtime makes for each layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "routed.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Some experts of a layer, by number or by address. Expert i has rows begin[i]..begin[i + 1] - 1 of
// a call of `num_rows` rows, whose results are at out; row_token has the tokens of this batch.
void run_batch(ExpertEngine& engine, const RoutedLayer& layer,
               const std::vector<std::uintptr_t>& experts, bool are_addresses,
               std::vector<std::int32_t> begin, std::int64_t num_tokens, std::uintptr_t row_token,
               std::int64_t num_rows, std::uintptr_t hidden, std::uintptr_t out) {
  if (begin.size() != experts.size() + 1 || begin.front() < 0 || begin.back() > num_rows)
    throw std::invalid_argument("begin has " + std::to_string(begin.size()) + " rows for " +
                                std::to_string(experts.size()) + " experts, expected one more, " +
                                "and all of them from 0 to " + std::to_string(num_rows));
  std::vector<const std::uint8_t*> addresses;
  addresses.reserve(experts.size());
  for (const std::uintptr_t expert : experts) {
    if (!are_addresses && expert >= static_cast<std::uintptr_t>(layer.num_experts))
      throw std::invalid_argument("expert " + std::to_string(expert) + ", expected 0 to " +
                                  std::to_string(layer.num_experts - 1));
    addresses.push_back(are_addresses ? pointer<const std::uint8_t>(expert)
                                      : layer.experts + expert * layer.expert_bytes);
  }
  const std::int32_t first = begin.front();
  for (std::int32_t& row : begin) row -= first;
  const ExpertCall call{static_cast<std::int64_t>(experts.size()),
                        num_tokens,
                        addresses.data(),
                        begin.data(),
                        pointer<const std::int32_t>(row_token),
                        pointer<const float>(hidden),
                        pointer<float>(out) + first * layer.layout.hidden_size};
  require_in_range(call, begin.back());
  const nb::gil_scoped_release release;
  engine.run(layer.layout, layer.activation, call);
}

}  // namespace

void bind_runtime(nb::module_& m) { m.def("run_batch", &run_batch); }

}  // namespace tandem
