// Compares convolutions, recurrences and compressed windows of random shapes on every instruction
// set, in fp32, with their definitions in double precision. Slots advance in turn, by prompts and
// by steps. Buffers are exactly as large as the calls say, so that the sanitizers find accesses
// outside.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "compression.hpp"
#include "experts.hpp"
#include "random.hpp"
#include "recurrent.hpp"

namespace {

using tandem::DecayKind;
using tandem::ValueType;
using tandem::checks::Random;
using Index = std::int64_t;

constexpr int kRounds = 12;
constexpr Index kSlots = 3;

// Tokens of some slots, slot by slot; `lengths` grow.
struct Tokens {
  std::vector<Index> slots, positions;
  bool have_drafts;

  tandem::StateTokens view() const {
    return {static_cast<Index>(slots.size()), slots.data(), positions.data(), have_drafts};
  }
};

Tokens some_tokens(Random& random, std::vector<Index>& lengths) {
  Tokens tokens{{}, {}, random.between(0, 1) == 1};
  for (Index slot = 0; slot < kSlots; ++slot) {
    if (random.between(0, 5) == 0) lengths[slot] = 0;  // another sequence takes the slot
    const Index most = tokens.have_drafts ? 1 + tandem::kMostDrafted : 150;
    const Index count = random.between(0, 2) ? random.between(0, 1) : random.between(0, most);
    for (Index i = 0; i < count; ++i) {
      tokens.slots.push_back(slot);
      tokens.positions.push_back(lengths[slot]++);
    }
  }
  return tokens;
}

// The log of all slots' drafted tokens, some of which are taken back.
struct Log {
  std::vector<Index> kept = std::vector<Index>(kSlots);
  std::vector<float> values;

  explicit Log(Index size) : values(kSlots * tandem::kMostDrafted * size) {}

  tandem::DraftLog view() { return {kept.data(), values.data()}; }

  // Takes back some drafted tokens of each slot.
  void take_back(Random& random, const Tokens& tokens, std::vector<Index>& lengths) {
    for (Index slot = 0; tokens.have_drafts && slot < kSlots; ++slot) {
      const Index count = std::count(tokens.slots.begin(), tokens.slots.end(), slot);
      if (count < 2) continue;
      kept[slot] = random.between(0, count - 1);
      lengths[slot] -= count - 1 - kept[slot];
    }
  }
};

bool is_near(const std::vector<float>& actual, const std::vector<double>& expected) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return error <= 1e-9 * size + 1e-12;
}

bool convolutions_agree(Random& random, tandem::RecurrentEngine& engine) {
  const Index channels = random.between(1, 700), width = random.between(2, 6);
  const auto weight = random.normals(width * channels), bias = random.normals(channels);
  std::vector<float> states(kSlots * (width - 1) * channels);
  std::vector<std::vector<float>> inputs(kSlots);
  Log log(channels);
  std::vector<Index> lengths(kSlots);
  const bool has_silu = random.between(0, 1) == 1;
  for (int call = 0; call < 6; ++call) {
    const Tokens tokens = some_tokens(random, lengths);
    const Index count = tokens.view().count, stride = channels + random.between(0, 3);
    const auto x = random.normals(std::max<Index>(1, count) * stride);
    std::vector<float> out(count * channels);
    engine.run(tandem::ShortConvolution{channels, width, weight.data(), bias.data(), has_silu,
                                        states.data(), log.view(), tokens.view(), ValueType::kFp32, x.data(),
                                        stride, out.data()});
    std::vector<double> expected(out.size());
    for (Index t = 0; t < count; ++t) {
      auto& past = inputs[tokens.slots[t]];
      past.resize(tokens.positions[t] * channels);
      past.insert(past.end(), x.begin() + t * stride, x.begin() + t * stride + channels);
      for (Index c = 0; c < channels; ++c) {
        double sum = bias[c];
        for (Index j = 0; j < width && j <= tokens.positions[t]; ++j)
          sum += double{weight[(width - 1 - j) * channels + c]} *
                 past[(tokens.positions[t] - j) * channels + c];
        expected[t * channels + c] = has_silu ? sum / (1 + std::exp(-sum)) : sum;
      }
    }
    if (!is_near(out, expected)) return false;
    log.take_back(random, tokens, lengths);
  }
  return true;
}

// Compresses one channel: values and gates of a window's tokens, oldest first.
double compressed(const std::vector<double>& values, const std::vector<double>& gates) {
  double sum = 0, weighted = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += std::exp(gates[i]);
    weighted += std::exp(gates[i]) * values[i];
  }
  return weighted / sum;
}

bool compressions_agree(Random& random, tandem::ThreadPool& pool) {
  const Index ratio = random.between(1, 9), series = random.between(1, 2);
  const Index dim = random.between(1, 150), width = series * dim;
  const auto bias = random.normals(ratio * width);
  const Index kept = series * ratio + tandem::kMostDrafted;
  std::vector<float> states(kSlots * kept * 2 * width, NAN);
  std::vector<std::vector<float>> values(kSlots), gates(kSlots);
  std::vector<Index> lengths(kSlots);
  Log log(0);
  tandem::CompressionEngine engine(pool);
  for (int call = 0; call < 6; ++call) {
    const Tokens tokens = some_tokens(random, lengths);
    const Index count = tokens.view().count;
    const Index value_stride = width + random.between(0, 3), gate_stride = width + random.between(0, 3);
    const auto x = random.normals(std::max<Index>(1, count) * value_stride);
    const auto z = random.normals(std::max<Index>(1, count) * gate_stride);
    std::vector<float> out(count * dim);
    engine.run({ratio, dim, series, bias.data(), states.data(), kept, kSlots, tokens.view(),
                ValueType::kFp32, x.data(), z.data(), value_stride, gate_stride, out.data()});
    std::vector<double> expected(out.size());
    for (Index t = 0; t < count; ++t) {
      const Index slot = tokens.slots[t], end = tokens.positions[t] + 1;
      values[slot].resize((end - 1) * width);
      gates[slot].resize((end - 1) * width);
      for (Index c = 0; c < width; ++c) {
        values[slot].push_back(x[t * value_stride + c]);
        gates[slot].push_back(z[t * gate_stride + c] + bias[(end - 1) % ratio * width + c]);
      }
      for (Index c = 0; end % ratio == 0 && c < dim; ++c) {
        std::vector<double> own_values, own_gates;
        for (Index p = std::max<Index>(0, end - series * ratio); p < end; ++p) {
          const Index at = p * width + (p < end - ratio ? 0 : series - 1) * dim + c;
          own_values.push_back(values[slot][at]);
          own_gates.push_back(gates[slot][at]);
        }
        expected[t * dim + c] = compressed(own_values, own_gates);
      }
    }
    if (!is_near(out, expected)) return false;
    log.take_back(random, tokens, lengths);
  }
  return true;
}

// The equations of a recurrence for one token and head, with the state in double precision.
struct Head {
  std::vector<double> state;  // (key_dim, value_dim)
  std::vector<std::vector<double>> states;  // the state after each token of the latest call

  double advance(const tandem::Recurrence& r, const float* q, const float* k, double q_size,
                 double k_size, double value, double rate, double skip, Index j,
                 const std::vector<double>& kept) {
    double recalled = 0, out = skip * value;
    for (Index i = 0; i < r.key_dim; ++i) {
      state[i * r.value_dim + j] *= kept[i];
      recalled += state[i * r.value_dim + j] * k[i] / k_size;
    }
    for (Index i = 0; i < r.key_dim; ++i) {
      double& s = state[i * r.value_dim + j];
      s += k[i] / k_size * rate * (r.is_delta ? value - recalled : value);
      out += s * q[i] / q_size * r.scale;
    }
    return out;
  }
};

double size_of(const float* row, Index dim, bool is_normalised) {
  double total = 1e-6;
  for (Index i = 0; i < dim; ++i) total += double{row[i]} * row[i];
  return is_normalised ? std::sqrt(total) : 1;
}

bool recurrences_agree(Random& random, tandem::RecurrentEngine& engine, DecayKind kind) {
  tandem::Recurrence r{};
  const bool is_pair = kind == DecayKind::kByPair;
  r.num_key_heads = is_pair ? 1 : random.between(1, 3);
  r.num_heads = is_pair ? 1 : r.num_key_heads * random.between(1, 3);
  r.key_dim = random.between(1, 40);
  r.value_dim = random.between(0, 2) ? random.between(1, 40) : random.between(41, 150);
  r.decay_kind = kind;
  r.is_delta = !is_pair && random.between(0, 1) == 1;
  r.is_normalised = r.is_delta;  // as in models; otherwise the delta rule grows without bounds
  r.scale = 0.5f;
  const Index blocks = r.blocks(), values = r.num_heads * r.value_dim;
  const auto a = random.normals(values * r.key_dim), skip = random.normals(values);
  std::vector<float> factor(blocks * r.key_dim * tandem::kStateBlock);
  for (Index i = 0; i < r.key_dim; ++i)
    for (Index j = 0; is_pair && j < r.value_dim; ++j)
      factor[(j / 16 * r.key_dim + i) * 16 + j % 16] = -std::fabs(a[i * r.value_dim + j]);
  r.factor = factor.data();
  r.skip = skip.data();
  std::vector<float> states(kSlots * r.num_heads * blocks * r.key_dim * tandem::kStateBlock);
  r.states = states.data();
  Log log(tandem::LoggedToken(r).size);
  r.log = log.view();
  std::vector<Head> heads(kSlots * r.num_heads);
  std::vector<Index> lengths(kSlots);
  for (int call = 0; call < 6; ++call) {
    const Tokens tokens = some_tokens(random, lengths);
    for (Head& head : heads) head.states.clear();
    const Index count = tokens.view().count, keys = r.num_key_heads * r.key_dim;
    const Index decays = is_pair ? r.value_dim : r.num_heads * (kind == DecayKind::kByKey ? r.key_dim : 1);
    const auto q = random.normals(count * keys), k = random.normals(count * keys);
    const auto v = random.normals(count * values);
    auto decay = random.normals(count * decays), rate = random.normals(count * r.num_heads, 0.3f);
    for (float& d : decay) d = is_pair ? std::fabs(d) : -std::fabs(d);
    std::vector<float> out(count * values);
    r.tokens = tokens.view();
    r.type = r.rate_type = ValueType::kFp32;
    r.query = {q.data(), keys, r.key_dim};
    r.key = {k.data(), keys, r.key_dim};
    r.value = {v.data(), values, r.value_dim};
    r.decay = decay.data();
    r.rate = rate.data();
    r.out = out.data();
    engine.run(r);
    std::vector<double> expected(out.size()), kept(r.key_dim);
    for (Index t = 0; t < count; ++t)
      for (Index h = 0; h < r.num_heads; ++h) {
        Head& head = heads[tokens.slots[t] * r.num_heads + h];
        if (tokens.positions[t] == 0) head.state.assign(r.key_dim * r.value_dim, 0);
        const Index of_keys = (t * r.num_key_heads + h / (r.num_heads / r.num_key_heads)) * r.key_dim;
        const float *query = q.data() + of_keys, *key = k.data() + of_keys;
        for (Index j = 0; j < r.value_dim; ++j) {
          const Index at = (t * r.num_heads + h) * r.value_dim + j;
          for (Index i = 0; i < r.key_dim; ++i)
            kept[i] = std::exp(
                is_pair ? double{decay[t * r.value_dim + j]} * factor[(j / 16 * r.key_dim + i) * 16 + j % 16]
                : kind == DecayKind::kByKey ? decay[(t * r.num_heads + h) * r.key_dim + i]
                                            : decay[t * r.num_heads + h]);
          expected[at] = head.advance(r, query, key, size_of(query, r.key_dim, r.is_normalised),
                                      size_of(key, r.key_dim, r.is_normalised), v[at],
                                      rate[t * r.num_heads + h], skip[h * r.value_dim + j], j, kept);
        }
        head.states.push_back(head.state);
      }
    if (!is_near(out, expected)) return false;
    log.take_back(random, tokens, lengths);
    for (Index slot = 0; tokens.have_drafts && slot < kSlots; ++slot)
      for (Index h = 0; h < r.num_heads; ++h) {
        Head& head = heads[slot * r.num_heads + h];
        if (head.states.size() > 1) head.state = head.states[log.kept[slot]];
      }
  }
  return true;
}

}  // namespace

int main() {
  Random random(1357);
  for (int round = 0; round < kRounds; ++round)
    for (const std::string& isa : tandem::available_isas()) {
      tandem::ThreadPool pool(static_cast<int>(random.between(1, 3)));
      tandem::RecurrentEngine engine(pool, isa);
      const auto kind = static_cast<DecayKind>(round % 3);
      if (!convolutions_agree(random, engine) || !recurrences_agree(random, engine, kind) ||
          !compressions_agree(random, pool)) {
        std::printf("round %d: %s differs, decays of kind %d\n", round, isa.c_str(),
                    static_cast<int>(kind));
        return 1;
      }
    }
  std::printf("convolutions, recurrences and windows of %d random shapes equal their definitions\n", kRounds);
  return 0;
}
