// What Python sees of the dense kernels, attention and sampling.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <vector>

#include "attention.hpp"
#include "bindings.hpp"
#include "blocks.hpp"
#include "dense.hpp"
#include "quantize.hpp"
#include "routed.hpp"
#include "sampling.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

constexpr std::size_t kMaxMatrices = 8;

// Addresses come from torch tensors, whose shapes and dtypes tandem.kernels.dense has checked.
DenseMatrix make_matrix(int format, std::int64_t group, std::int64_t rows, std::int64_t cols,
                        std::uintptr_t data, std::uintptr_t scales, std::uintptr_t bias) {
  return {{static_cast<Format>(format), (rows + kBlockRows - 1) / kBlockRows, cols, group,
           pointer<const std::uint8_t>(data), pointer<const std::uint8_t>(scales),
           pointer<const float>(bias)},
          rows};
}

void run_dense(DenseEngine& engine, const nb::tuple& matrices, std::int64_t num_tokens,
               std::int64_t in_features, bool is_bf16, std::uintptr_t input,
               const nb::tuple& outputs) {
  std::array<const DenseMatrix*, kMaxMatrices> chosen{};
  std::array<void*, kMaxMatrices> out{};
  const std::size_t count = matrices.size();
  if (count > kMaxMatrices || outputs.size() != count)
    throw std::invalid_argument("expected up to 8 matrices and as many outputs");
  for (std::size_t i = 0; i < count; ++i) {
    chosen[i] = nb::cast<const DenseMatrix*>(matrices[i]);
    out[i] = pointer<void>(nb::cast<std::uintptr_t>(outputs[i]));
  }
  const Turn turn(engine);
  engine.run({static_cast<std::int64_t>(count), chosen.data(), num_tokens, in_features,
              value_type(is_bf16), pointer<const void>(input), out.data()});
}

void run_groups(DenseEngine& engine, const std::vector<const DenseMatrix*>& matrices,
                std::int64_t num_tokens, std::int64_t in_features, bool is_bf16,
                std::uintptr_t input, std::int64_t token_stride, std::int64_t group_stride,
                std::uintptr_t out) {
  const std::vector<void*> outputs = grouped_outputs(matrices, is_bf16, out);
  const Turn turn(engine);
  engine.run({static_cast<std::int64_t>(matrices.size()), matrices.data(), num_tokens, in_features,
              value_type(is_bf16), pointer<const void>(input), outputs.data(), token_stride,
              group_stride, grouped_stride(matrices)});
}

void read_rows(DenseEngine& engine, const DenseMatrix& matrix, std::int64_t cols,
               std::int64_t count, std::uintptr_t numbers, bool is_bf16, std::uintptr_t out) {
  const Turn turn(engine);
  engine.read({&matrix, cols, count, pointer<const std::int64_t>(numbers), value_type(is_bf16),
               pointer<void>(out)});
}

std::uintptr_t address(std::int64_t value) { return static_cast<std::uintptr_t>(value); }

// `calls` is (count, 14) int64, rows of what tandem.kernels.formats.native_quantize writes.
bool quantize_matrices(const std::string& isa, int num_threads, bool has_search, std::int64_t count,
                       std::uintptr_t calls) {
  constexpr std::int64_t kFields = 14;
  const auto* f = pointer<const std::int64_t>(calls);
  std::vector<QuantizeCall> matrices;
  for (std::int64_t i = 0; i < count; ++i, f += kFields)
    matrices.push_back({static_cast<Format>(f[0]), f[1], has_search, f[2], f[3], f[4],
                        static_cast<SourceType>(f[5]), pointer<const void>(address(f[6])), f[7],
                        f[8], pointer<const float>(address(f[9])),
                        pointer<std::uint8_t>(address(f[10])), f[11],
                        pointer<std::uint8_t>(address(f[12])), f[13]});
  const nb::gil_scoped_release release;
  return quantize(matrices, isa, num_threads);
}

Numbers numbers_of(const std::int64_t* f) {
  return {pointer<const std::uint8_t>(address(f[0])), static_cast<NumberType>(f[1]), f[2], f[3]};
}

// `calls` is (count, 27) int64, rows of what tandem.kernels.formats.file_rows writes.
bool rearrange_blocks(int num_threads, std::int64_t count, std::uintptr_t calls) {
  constexpr std::int64_t kNumbers = 27;
  const auto* f = pointer<const std::int64_t>(calls);
  std::vector<Rearrangement> works;
  for (std::int64_t i = 0; i < count; ++i, f += kNumbers)
    works.push_back({static_cast<Format>(f[0]), static_cast<BlockKind>(f[1]),
                     pointer<const std::uint8_t>(address(f[2])),
                     pointer<const std::int64_t>(address(f[3])), f[4], f[5],
                     pointer<std::uint8_t>(address(f[6])), pointer<std::uint8_t>(address(f[7])),
                     f[8], f[9], pointer<const std::uint8_t>(address(f[10])),
                     pointer<const float>(address(f[11])),
                     {f[12], f[13], static_cast<std::uint32_t>(f[14]),
                      static_cast<std::uint8_t>(f[15]), f[16], f[17], f[18],
                      numbers_of(f + 19), numbers_of(f + 23)}});
  const nb::gil_scoped_release release;
  return rearrange(works, num_threads);
}

void bind_attention(nb::module_& m) {
  // What stays the same from step to step, by layer.
  nb::class_<AttentionCall>(m, "AttentionLayer")
      .def("__init__",
           [](AttentionCall* call, int cache_type, std::int64_t num_heads,
              std::int64_t num_kv_heads, std::int64_t key_dim, std::int64_t value_dim, float scale,
              float softcap, std::int64_t window, std::uintptr_t sinks) {
             new (call) AttentionCall{};
             call->layout = {static_cast<KvType>(cache_type), key_dim, value_dim};
             call->num_heads = num_heads;
             call->num_kv_heads = num_kv_heads;
             call->scale = scale;
             call->softcap = softcap;
             call->window = window;
             call->sinks = pointer<const float>(sinks);
           })
      .def_prop_ro("key_block_bytes",
                   [](const AttentionCall& call) { return call.layout.key_block_bytes(); })
      .def_prop_ro("value_block_bytes",
                   [](const AttentionCall& call) { return call.layout.value_block_bytes(); })
      .def("set_cache", [](AttentionCall& call, std::uintptr_t keys, std::uintptr_t values,
                           std::int64_t capacity_blocks) {
        call.keys = pointer<std::uint8_t>(keys);
        call.values = pointer<std::uint8_t>(values);
        call.capacity_blocks = capacity_blocks;
      });
  nb::class_<AttentionEngine>(m, "AttentionEngine")
      .def("__init__",
           [](AttentionEngine* self, ExpertEngine& engine, bool may_use_tiles) {
             new (self) AttentionEngine(engine.pool(), engine.isa(), may_use_tiles);
           },
           nb::arg(), nb::arg("may_use_tiles") = true, nb::keep_alive<1, 2>())
      .def("append",
           [](AttentionEngine& engine, AttentionCall& call, bool is_bf16, std::int64_t num_tokens,
              std::uintptr_t rows, std::uintptr_t positions, std::uintptr_t key,
              std::int64_t key_token_stride, std::int64_t key_head_stride, std::uintptr_t value,
              std::int64_t value_token_stride, std::int64_t value_head_stride) {
             call.type = value_type(is_bf16);
             call.num_tokens = num_tokens;
             call.rows = pointer<const std::int64_t>(rows);
             call.positions = pointer<const std::int64_t>(positions);
             call.new_key = {pointer<const void>(key), key_token_stride, key_head_stride};
             call.new_value = {pointer<const void>(value), value_token_stride, value_head_stride};
             engine.append(call);
           })
      .def("attend", [](AttentionEngine& engine, AttentionCall& call, bool is_bf16,
                        std::int64_t num_tokens, std::uintptr_t rows, std::uintptr_t positions,
                        std::uintptr_t query, std::int64_t token_stride, std::int64_t head_stride,
                        std::uintptr_t selected, std::int64_t num_selected, std::uintptr_t out) {
        call.type = value_type(is_bf16);
        call.num_tokens = num_tokens;
        call.rows = pointer<const std::int64_t>(rows);
        call.positions = pointer<const std::int64_t>(positions);
        call.query = {pointer<const void>(query), token_stride, head_stride};
        call.selected = pointer<const std::int32_t>(selected);
        call.num_selected = num_selected;
        call.out = pointer<void>(out);
        const Turn turn(engine);
        engine.run(call);
      });
}

void bind_routed(nb::module_& m) {
  nb::class_<RoutedLayer>(m, "RoutedLayer")
      .def("__init__", [](RoutedLayer* self, const ExpertLayout& layout, int activation,
                          float alpha, float limit, float offset, std::int64_t num_experts,
                          std::uintptr_t experts, std::int64_t expert_bytes) {
        new (self) RoutedLayer{layout,
                               {static_cast<Activation>(activation), alpha, limit, offset},
                               num_experts,
                               pointer<const std::uint8_t>(experts),
                               expert_bytes};
      });
  nb::class_<RoutedExperts>(m, "RoutedExperts")
      .def(nb::init<ExpertEngine&>(), nb::keep_alive<1, 2>())
      .def("run", [](RoutedExperts& self, const RoutedLayer& layer, std::int64_t num_tokens,
                     std::int64_t top_k, int type, std::uintptr_t hidden, std::uintptr_t index,
                     int weight_type, std::uintptr_t weights, std::uintptr_t out) {
        const Turn turn(self);
        return self.run(layer, {num_tokens, top_k, token_type(type), pointer<const void>(hidden),
                                pointer<const std::int64_t>(index), token_type(weight_type),
                                pointer<const void>(weights), pointer<void>(out)});
      });
}

// A sampler with the rule that it applies.
struct RuledSampler {
  TokenSampler sampler;
  SamplingRule rule;
};

// Returns a field of a Python rule; a step that it leaves out (None) is `neutral`.
template <typename T>
T rule_field(nb::handle rule, const char* name, T neutral) {
  const nb::object value = rule.attr(name);
  return value.is_none() ? neutral : nb::cast<T>(value);
}

// Reads a tandem.generate.sampling.SamplingRule.
SamplingRule sampling_rule(nb::handle rule) {
  return {
      .repetition_penalty = rule_field(rule, "repetition_penalty", 1.0F),
      .temperature = rule_field(rule, "temperature", 0.0F),
      .top_k = rule_field<std::int64_t>(rule, "top_k", 0),
      .top_p = rule_field(rule, "top_p", 1.0F),
      .min_p = rule_field(rule, "min_p", 0.0F),
  };
}

void bind_sampling(nb::module_& m) {
  nb::class_<RuledSampler>(m, "TokenSampler")
      .def(
          "__init__",
          [](RuledSampler* self, const std::string& isa, nb::handle rule) {
            new (self) RuledSampler{TokenSampler(isa), sampling_rule(rule)};
          },
          nb::arg("isa"), nb::arg("rule"))
      .def("choose", [](const RuledSampler& self, bool is_bf16, std::uintptr_t logits,
                        std::int64_t vocabulary, std::uintptr_t seen, std::int64_t num_seen,
                        double uniform) {
        const nb::gil_scoped_release release;
        return self.sampler.choose(self.rule,
                                   {value_type(is_bf16), pointer<const void>(logits), vocabulary,
                                    pointer<const std::int64_t>(seen), num_seen},
                                   uniform);
      });
}

}  // namespace

void bind_dense(nb::module_& m) {
  m.def("quantize", &quantize_matrices);
  m.def("block_bytes", [](int kind) { return block_reader(static_cast<BlockKind>(kind)).bytes; });
  m.def("block_cols", [](int kind) { return block_reader(static_cast<BlockKind>(kind)).cols; });
  m.def("rearrange_blocks", &rearrange_blocks);
  nb::class_<DenseMatrix>(m, "DenseMatrix");
  m.def("make_dense_matrix", &make_matrix);
  nb::class_<DenseEngine>(m, "DenseEngine")
      .def(nb::init<ExpertEngine&>(), nb::keep_alive<1, 2>())
      .def("run", &run_dense)
      .def("run_groups", &run_groups)
      .def("read", &read_rows);
  bind_attention(m);
  bind_routed(m);
  bind_sampling(m);
}

}  // namespace tandem
