// The Python bindings of programs: a recorded step's operations are added one by one and run as one
// call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "bindings_calls.hpp"
#include "program.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

// Rows along the last dimension with a constant stride.
struct EvenRows {
  const void* data;
  std::int64_t count, stride;
};

EvenRows even_rows(const Tensor& x, const char* name, ValueType type) {
  const std::int64_t cols = x.size(-1);
  bool is_even = x.dims() > 0 && (cols <= 1 || x.stride(-1) == 1);
  std::int64_t count = 1, stride = cols;
  for (int dim = -2; dim >= -x.dims(); --dim) {
    if (x.size(dim) == 1) continue;
    is_even = is_even && (count == 1 || x.stride(dim) == count * stride);
    if (count == 1) stride = x.stride(dim);
    count *= x.size(dim);
  }
  if (!is_even || x.element() != static_cast<Element>(type))
    x.refuse(name, "evenly spaced rows of one type");
  return {x.data(name), count, stride};
}

void add_norm(Program& program, float eps, int rounding, const Tensor& x,
              const MaybeTensor& weight, int gate_kind, const MaybeTensor& gate, const Tensor& out) {
  const ValueType type = x.value_type("x");
  const EvenRows rows = even_rows(x, "x", type);
  const std::int64_t cols = x.size(-1);
  std::int64_t weight_rows = 1;
  if (weight && cols > 0) weight_rows = std::max<std::int64_t>(1, weight->count() / cols);
  require(gate_kind >= 0 && gate_kind <= static_cast<int>(GateKind::kSigmoidAfter) &&
              (gate_kind != 0) == gate.has_value(),
          "a gate where there is a kind of gate");
  require(rounding >= 0 && rounding <= static_cast<int>(NormRounding::kFactor), "a known rounding");
  require(rows.count % weight_rows == 0, "a multiple of the weight's rows");
  EvenRows gates{};
  if (gate) gates = even_rows(*gate, "gate", type);
  if (gate && (gates.count != rows.count || gate->size(-1) != cols)) gate->refuse("gate", "the sizes of x");
  program.add(RmsNorm{rows.count, cols, eps, static_cast<NormRounding>(rounding), type, rows.data, rows.stride,
                      dense_or_null<const float>(weight, "weight", weight_rows * cols), weight_rows,
                      static_cast<GateKind>(gate_kind), gates.data, gates.stride,
                      out.values("out", type, rows.count * cols, true)});
}

// Rotates the first values of heads (tokens, heads, dim) by tables (tokens, turned).
void add_rotary(Program& program, const Tensor& x, const Tensor& cos, const Tensor& sin,
                const Tensor& out) {
  const ValueType type = x.value_type("x");
  const HeadView heads = heads_of(x, "x", type, -1, -1, -1);
  const std::int64_t tokens = x.size(0), turned = cos.size(-1);
  require(turned <= x.size(2) && turned % 2 == 0, "an even number of angles within a head");
  program.add(Rotary{tokens, x.size(1), x.size(2), turned, type, heads.data, heads.token_stride,
                     heads.head_stride, cos.values("cos", type, tokens * turned),
                     sin.values("sin", type, tokens * turned),
                     out.values("out", type, x.count(), true)});
}

// Rotates the last pairs of heads by fp32 cosines and sines (tokens, turned).
void add_rotary_pairs(Program& program, const Tensor& x, const Tensor& turns, const Tensor& out) {
  const ValueType type = x.value_type("x");
  const HeadView heads = heads_of(x, "x", type, -1, -1, -1);
  const std::int64_t tokens = x.size(0), turned = tokens > 0 ? turns.count() / tokens : x.size(2);
  if (turned < 2 || turned % 2 != 0 || turned > x.size(2))
    turns.refuse("turns", "an even number of values for each token, at most the head size");
  program.add(RotaryPairs{tokens, x.size(1), x.size(2), turned, type, heads.data, heads.token_stride,
                          heads.head_stride, turns.dense<const float>("turns", tokens * turned),
                          out.values("out", type, x.count(), true)});
}

void add_choice(Program& program, std::int64_t top_k, bool is_normalised, float scale,
                const Tensor& logits, const Tensor& weights, const Tensor& index) {
  logits.require_dims("logits", 2);
  const std::int64_t tokens = logits.size(0), experts = logits.size(1);
  require(top_k >= 0 && top_k <= experts, "a top_k of at most the number of experts");
  const ValueType type = logits.value_type("logits"), weight_type = weights.value_type("weights");
  program.add(Choice{tokens, experts, top_k, is_normalised, scale, type,
                     logits.values("logits", type, tokens * experts), weight_type,
                     weights.values("weights", weight_type, tokens * top_k, true),
                     index.dense<std::int64_t>("index", tokens * top_k)});
}

void add_ranked_choice(Program& program, std::int64_t top_k, std::int64_t groups,
                       std::int64_t kept_groups, std::int64_t best_of_group, bool is_normalised,
                       float epsilon, float scale, const Tensor& scores, const Tensor& ranks,
                       const Tensor& weights, const Tensor& index) {
  scores.require_dims("scores", 2);
  const std::int64_t tokens = scores.size(0), experts = scores.size(1);
  require(groups >= 1 && experts % groups == 0 && kept_groups >= 0 && kept_groups <= groups &&
              best_of_group >= 0 && best_of_group <= experts / groups && top_k >= 0 &&
              top_k <= kept_groups * (experts / groups),
          "groups of equal size with enough experts");
  const ValueType type = scores.value_type("scores"), weight_type = weights.value_type("weights");
  program.add(RankedChoice{tokens, experts, top_k, groups, kept_groups, best_of_group,
                           is_normalised, epsilon, scale, type,
                           scores.values("scores", type, tokens * experts),
                           ranks.dense<const float>("ranks", tokens * experts), weight_type,
                           weights.values("weights", weight_type, tokens * top_k, true),
                           index.dense<std::int64_t>("index", tokens * top_k)});
}

void add_dense(Program& program, const std::vector<const DenseMatrix*>& matrices, const Tensor& x,
               const std::vector<Tensor>& outputs) {
  const DenseProduct product(matrices, x, outputs);
  program.add(Program::Dense{matrices, product.outputs, product.num_tokens, product.in_features,
                             product.type, product.input});
}

void add_groups(Program& program, const std::vector<const DenseMatrix*>& matrices, const Tensor& x,
                const Tensor& out) {
  const GroupsProduct product(matrices, x, out);
  program.add(Program::Dense{matrices, product.outputs, product.num_tokens, product.in_features,
                             product.type, product.input, product.token_stride,
                             product.group_stride, product.out_stride});
}

void add_table_rows(Program& program, const DenseMatrix& matrix, const Tensor& numbers,
                    const Tensor& out) {
  program.add(rows_call(matrix, numbers, out));
}

void add_attention(Program& program, const AttentionCall& layer, const Tensor& slots,
                   const Tensor& positions, const Tensor& query, const Tensor& key,
                   const Tensor& value, const MaybeTensor& selected, const Tensor& out,
                   const MaybeTensor& compressed, const MaybeTensor& bias_states,
                   const MaybeTensor& sinks) {
  AttentionCall step = layer;
  take_new(step, slots, positions, key, value, compressed);
  take_query(step, slots, positions, query, selected, bias_states, sinks, out);
  program.add(Program::Attention{&layer, step});
}

std::int64_t add_experts(Program& program, const RoutedLayer& layer, const Tensor& hidden,
                         const Tensor& index, const Tensor& weights, const Tensor& out) {
  return program.add(layer, routed_call(layer, hidden, index, weights, out));
}

void require_log(const DraftLog& log) { require(log.kept != nullptr, "a layer with a draft log"); }

StateTokens state_tokens(std::int64_t count, const Tensor& slots, const Tensor& positions,
                         bool have_drafts) {
  return {count, slots.dense<const std::int64_t>("slots", count),
          positions.dense<const std::int64_t>("positions", count), have_drafts};
}

void add_convolution(Program& program, const ShortConvolution& layer, const Tensor& slots,
                     const Tensor& positions, bool have_drafts, const Tensor& x,
                     const Tensor& out) {
  ShortConvolution call = layer;
  const std::int64_t tokens = slots.count();
  call.tokens = state_tokens(tokens, slots, positions, have_drafts);
  call.type = x.value_type("x");
  call.input = x.strided("x", call.type, {tokens, layer.channels});
  if (x.size(1) > 1 && x.stride(1) != 1) x.refuse("x", "contiguous channels");
  call.token_stride = x.stride(0);
  call.out = out.values("out", call.type, tokens * layer.channels, true);
  require_log(call.log);
  program.add(call);
}

void add_recurrence(Program& program, const Recurrence& layer, const Tensor& slots,
                    const Tensor& positions, bool have_drafts, const Tensor& query,
                    const Tensor& key, const Tensor& value, const Tensor& decay,
                    const MaybeTensor& rate, const Tensor& out) {
  Recurrence call = layer;
  const std::int64_t tokens = slots.count(), heads = layer.num_heads;
  call.tokens = state_tokens(tokens, slots, positions, have_drafts);
  call.type = value.value_type("value");
  call.query = heads_of(query, "query", call.type, tokens, layer.num_key_heads, layer.key_dim);
  call.key = heads_of(key, "key", call.type, tokens, layer.num_key_heads, layer.key_dim);
  call.value = heads_of(value, "value", call.type, tokens, heads, layer.value_dim);
  const std::int64_t faded = layer.decay_kind == DecayKind::kByHead  ? heads
                             : layer.decay_kind == DecayKind::kByKey ? heads * layer.key_dim
                                                                     : layer.value_dim;
  call.decay = decay.dense<const float>("decay", tokens * faded);
  call.rate_type = rate ? rate->value_type("rate") : ValueType::kFp32;
  call.rate = rate ? rate->values("rate", call.rate_type, tokens * heads) : nullptr;
  call.out = out.values("out", call.type, tokens * heads * layer.value_dim, true);
  require_log(call.log);
  program.add(call);
}

// Returns a token's values or gates: (tokens, width), contiguous within a token.
const void* rows_of(const Tensor& x, const char* name, ValueType type, std::int64_t tokens,
                    std::int64_t width) {
  const void* rows = x.strided(name, type, {tokens, width});
  if (x.size(1) > 1 && x.stride(1) != 1) x.refuse(name, "contiguous values for each token");
  return rows;
}

void add_compression(Program& program, const WindowCompression& layer, const Tensor& slots,
                     const Tensor& positions, const Tensor& values, const Tensor& gates,
                     const Tensor& out) {
  WindowCompression call = layer;
  const std::int64_t tokens = slots.count();
  call.tokens = state_tokens(tokens, slots, positions, false);
  call.type = values.value_type("values");
  call.values = rows_of(values, "values", call.type, tokens, layer.width());
  call.gates = rows_of(gates, "gates", call.type, tokens, layer.width());
  call.value_stride = values.stride(0);
  call.gate_stride = gates.stride(0);
  call.out = out.values("out", call.type, tokens * layer.dim, true);
  program.add(call);
}

// Streams (.., streams, dim); a matrix (rows, streams * dim) with its base (rows) and scales (kinds
// of rows). `weights` (.., rows - streams) receive the weights of the output, if the matrix has
// rows for them, and of the mixture.
void add_mix_in(Program& program, float norm_eps, float eps, float output_factor, float output_eps,
                std::int64_t num_rounds, const Tensor& streams, const Tensor& matrix,
                const Tensor& base, const Tensor& scales, const Tensor& out,
                const Tensor& weights) {
  MixIn call{};
  call.num_streams = streams.size(-2);
  call.dim = streams.size(-1);
  require(call.num_streams >= 1 && call.num_streams <= kMostStreams && call.dim >= 1 && num_rounds >= 0 &&
              num_rounds <= kMostRounds,
          "1 to 16 streams of one value or more, and up to 1,024 rounds");
  call.num_tokens = streams.count() / call.num_values();
  call.num_rounds = num_rounds;
  call.has_outputs = matrix.size(0) != call.num_rows();
  if (matrix.size(0) != call.num_rows())
    matrix.refuse("matrix", "a row for each weight of streams, output and mixture");
  call.norm_eps = norm_eps;
  call.eps = eps;
  call.output_factor = output_factor;
  call.output_eps = output_eps;
  call.type = streams.value_type("streams");
  call.streams = streams.values("streams", call.type, streams.count());
  call.matrix_type = matrix.value_type("matrix");
  call.matrix = matrix.values("matrix", call.matrix_type, call.num_rows() * call.num_values());
  call.base = base.dense<const float>("base", call.num_rows());
  call.scales = scales.dense<const float>("scales", 1 + call.has_outputs + (num_rounds > 0));
  call.out = out.values("out", call.type, call.num_tokens * call.dim, true);
  call.weights = weights.dense<float>("weights", call.num_tokens * call.num_weights());
  program.add(call);
}

// A layer's output (.., dim), and the streams with the weights that `add_mix_in` computed from
// them.
void add_mix_out(Program& program, const Tensor& y, const Tensor& weights, const Tensor& streams,
                 const Tensor& out) {
  MixOut call{};
  call.num_streams = streams.size(-2);
  call.dim = streams.size(-1);
  const std::int64_t n = call.num_streams;
  require(n >= 1 && n <= kMostStreams && call.dim >= 1, "1 to 16 streams of at least one value");
  call.num_tokens = streams.count() / (n * call.dim);
  call.type = streams.value_type("streams");
  call.y = y.values("y", call.type, call.num_tokens * call.dim);
  call.weights = weights.dense<const float>("weights", call.num_tokens * n * (n + 1));
  call.streams = streams.values("streams", call.type, streams.count());
  call.out = out.values("out", call.type, streams.count(), true);
  program.add(call);
}

// `log` is (slots, tokens that may be drafted, values of a token), with as many slots as there are
// states.
DraftLog draft_log(const Tensor& kept, const Tensor& log, std::int64_t slots, std::int64_t values) {
  return {kept.dense<std::int64_t>("kept", slots),
          log.dense<float>("log", slots * kMostDrafted * values), slots};
}

void init_convolution(ShortConvolution* self, const Tensor& weight, const MaybeTensor& bias,
                      bool has_silu, const Tensor& states) {
  weight.require_dims("weight", 2);
  const std::int64_t width = weight.size(0), channels = weight.size(1), slots = states.size(0);
  require(width >= 2 && width <= kMostWidth, "a convolution over 2 to 16 tokens");
  ShortConvolution layer{};
  layer.channels = channels;
  layer.width = width;
  layer.weight = weight.dense<const float>("weight", width * channels);
  layer.bias = dense_or_null<const float>(bias, "bias", channels);
  layer.has_silu = has_silu;
  layer.states = states.dense<float>("states", slots * (width - 1) * channels);
  layer.log.num_slots = slots;
  new (self) ShortConvolution(layer);
}

// `bias` is (ratio, series * dim), `states` (slots, kept tokens, 2, series * dim).
void init_compression(WindowCompression* self, std::int64_t num_series, const Tensor& bias,
                      const Tensor& states) {
  bias.require_dims("bias", 2);
  states.require_dims("states", 4);
  const std::int64_t ratio = bias.size(0), width = bias.size(1);
  require((num_series == 1 || num_series == 2) && width % num_series == 0 && ratio >= 1 && width >= 1,
          "one series of values or two of the same size");
  WindowCompression layer{};
  layer.ratio = ratio;
  layer.dim = width / num_series;
  layer.num_series = num_series;
  layer.bias = bias.dense<const float>("bias", ratio * width);
  layer.num_slots = states.size(0);
  layer.num_kept = states.size(1);
  require(layer.num_kept >= layer.span(), "room for all tokens of a window");
  layer.states = states.dense<float>("states", layer.num_slots * layer.num_kept * 2 * width);
  new (self) WindowCompression(layer);
}

void init_recurrence(Recurrence* self, std::int64_t num_heads, std::int64_t num_key_heads,
                     std::int64_t key_dim, std::int64_t value_dim, int decay_kind, bool is_delta,
                     bool is_normalised, float scale, const MaybeTensor& factor,
                     const MaybeTensor& skip, const Tensor& states) {
  constexpr std::int64_t kMost = 1 << 20;
  require(num_heads > 0 && num_heads <= kMost && num_key_heads > 0 &&
              num_heads % num_key_heads == 0 && key_dim > 0 && key_dim <= kMostKeyDim &&
              value_dim > 0 && value_dim <= kMost && decay_kind >= 0 &&
              decay_kind <= static_cast<int>(DecayKind::kByPair),
          "keys of up to 512 values, for equally many heads each");
  Recurrence layer{};
  layer.num_heads = num_heads;
  layer.num_key_heads = num_key_heads;
  layer.key_dim = key_dim;
  layer.value_dim = value_dim;
  layer.decay_kind = static_cast<DecayKind>(decay_kind);
  layer.is_delta = is_delta;
  layer.is_normalised = is_normalised;
  layer.scale = scale;
  require((layer.decay_kind == DecayKind::kByPair) == factor.has_value(), "factors of decays by pair");
  const std::int64_t padded = layer.blocks() * kStateBlock * key_dim, slots = states.size(0);
  layer.factor = dense_or_null<const float>(factor, "factor", padded);
  layer.skip = dense_or_null<const float>(skip, "skip", num_heads * value_dim);
  layer.states = states.dense<float>("states", slots * num_heads * padded);
  layer.log.num_slots = slots;
  new (self) Recurrence(layer);
}

void bind_recurrent(nb::module_& m) {
  // The part of a call that stays the same from step to step, by layer.
  nb::class_<ShortConvolution>(m, "ShortConvolution")
      .def("__init__", &init_convolution)
      .def("keep_drafts", [](ShortConvolution& self, const Tensor& kept, const Tensor& log) {
        self.log = draft_log(kept, log, self.log.num_slots, self.channels);
      });
  nb::class_<Recurrence>(m, "Recurrence")
      .def("__init__", &init_recurrence)
      .def_prop_ro("logged_values", [](const Recurrence& self) { return LoggedToken(self).size; })
      .def("keep_drafts", [](Recurrence& self, const Tensor& kept, const Tensor& log) {
        self.log = draft_log(kept, log, self.log.num_slots, LoggedToken(self).size);
      });
  nb::class_<WindowCompression>(m, "WindowCompression").def("__init__", &init_compression);
  nb::class_<RecurrentEngine>(m, "RecurrentEngine")
      .def("__init__",
           [](RecurrentEngine* self, ExpertEngine& engine) {
             new (self) RecurrentEngine(engine.pool(), engine.isa());
           },
           nb::keep_alive<1, 2>());
}

}  // namespace

void bind_program(nb::module_& m) {
  bind_recurrent(m);
  bind_index_keys(m);
  // The caller keeps matrices, layers and tensors alive.
  auto program = nb::class_<Program>(m, "Program");
  bind_tensor_ops(program);
  program
      .def(nb::init<ExpertEngine&, DenseEngine&, AttentionEngine&, RoutedExperts&,
                    RecurrentEngine&>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def("add_norm", &add_norm)
      .def("add_rotary", &add_rotary)
      .def("add_rotary_pairs", &add_rotary_pairs)
      .def("add_choice", &add_choice)
      .def("add_ranked_choice", &add_ranked_choice)
      .def("add_dense", &add_dense)
      .def("add_groups", &add_groups)
      .def("add_rows", &add_table_rows, nb::keep_alive<1, 2>())
      .def("add_convolution", &add_convolution)
      .def("add_recurrence", &add_recurrence)
      .def("add_compression", &add_compression, nb::keep_alive<1, 2>())
      .def("add_mix_in", &add_mix_in)
      .def("add_mix_out", &add_mix_out)
      .def("add_attention", &add_attention, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none() = nb::none(),
           nb::arg().none() = nb::none(), nb::arg().none() = nb::none(), nb::keep_alive<1, 2>())
      .def("add_experts", &add_experts)
      .def("num_active", &Program::num_active)
      .def("run", [](Program& program) {
        const Turn turn(program);
        program.run();
      });
}

}  // namespace tandem
