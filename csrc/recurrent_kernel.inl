// Convolutions and recurrences for one width of registers. Each instruction set's file includes it,
// after vectors.inl and inside its own namespace, with TANDEM_LANES set.

constexpr int kBlockVectors = kStateBlock / TANDEM_LANES;

// Rounds a value as storing it in a tensor of this type does.
inline float rounded(float value, ValueType type) {
  return type == ValueType::kBf16 ? bf16_to_float(float_to_bf16(value)) : value;
}

inline Vector silu(Vector x) {
  const Vector e = exponential(x < 0 ? x : -x);
  return x * ((x < 0 ? e : broadcast(1)) / (1.0f + e));
}

// ---- short convolutions ----

constexpr std::int64_t kRingChannels = 256;

// The last inputs of some channels, oldest first, as a ring of rows.
class LastInputs {
 public:
  explicit LastInputs(std::int64_t width) : width_(width) {
    for (std::int64_t age = 0; age < width; ++age) rows[age] = memory_[age];
  }

  float* newest() { return rows[width_ - 1]; }
  void move_on() { std::rotate(rows, rows + 1, rows + width_); }

  float* rows[kMostWidth];  // by age, oldest first

 private:
  std::int64_t width_;
  float memory_[kMostWidth][kRingChannels] = {};
};

// out = bias + the sum of weights times rows, for `Width` rows, or for `width` rows if it is 0.
template <int Width>
void weigh(std::int64_t width, const float (*weight)[kRingChannels], const float* bias,
           float* const* rows, float* out) {
  const std::int64_t count = Width ? Width : width;
  for (std::int64_t c = 0; c < kRingChannels; c += TANDEM_LANES) {
    Vector sum = load(bias + c);
    for (std::int64_t j = 0; j < count; ++j) sum += load(weight[j] + c) * load(rows[j] + c);
    store(out + c, sum);
  }
}

inline void activate(float* row, ValueType type) {
  for (std::int64_t c = 0; c < kRingChannels; ++c) row[c] = rounded(row[c], type);
  for (std::int64_t c = 0; c < kRingChannels; c += TANDEM_LANES) store(row + c, silu(load(row + c)));
}

void convolve_ring(const ShortConvolution& call, const StateSegment& segment, std::int64_t first,
                   std::int64_t count) {
  LastInputs inputs(call.width);
  const std::int64_t kept = call.width - 1;
  float* state = call.states + segment.slot * kept * call.channels + first;
  float weight[kMostWidth][kRingChannels] = {}, bias[kRingChannels] = {}, out[kRingChannels];
  for (std::int64_t j = 0; j < call.width; ++j) {
    std::memcpy(weight[j], call.weight + j * call.channels + first, count * sizeof(float));
    if (j < kept && !segment.is_beginning)
      std::memcpy(inputs.rows[j], state + j * call.channels, count * sizeof(float));
  }
  if (call.bias) std::memcpy(bias, call.bias + first, count * sizeof(float));
  float* log = call.log.values + segment.slot * kMostDrafted * call.channels + first;
  for (std::int64_t i = 0; i < segment.num_again; ++i) {
    std::memcpy(inputs.newest(), log + i * call.channels, count * sizeof(float));
    inputs.move_on();
  }
  const auto weigh_rows = call.width == 4 ? weigh<4> : call.width == 3 ? weigh<3> : weigh<0>;
  for (std::int64_t t = segment.first; t < segment.first + segment.count; ++t) {
    load_values(value_at(call.input, call.type, t * call.token_stride + first), call.type, count,
                inputs.newest());
    weigh_rows(call.width, weight, bias, inputs.rows, out);
    if (call.has_silu) activate(out, call.type);
    store_values(out, count, call.type, value_at(call.out, call.type, t * call.channels + first));
    const std::int64_t drafted = t - segment.first - segment.num_certain;
    if (drafted >= 0)
      std::memcpy(log + drafted * call.channels, inputs.newest(), count * sizeof(float));
    inputs.move_on();
    for (std::int64_t j = 0; drafted == -1 && j < kept; ++j)
      std::memcpy(state + j * call.channels, inputs.rows[j], count * sizeof(float));
  }
}

void convolve(const ShortConvolution& call, const StateSegment& segment,
              std::int64_t first_channel, std::int64_t num_channels) {
  const std::int64_t end = first_channel + num_channels;
  for (std::int64_t c = first_channel; c < end; c += kRingChannels)
    convolve_ring(call, segment, c, std::min(kRingChannels, end - c));
}

// ---- recurrences ----

// Divides a row by its length as the reference does, and multiplies it by `scale`.
inline void normalise(float* row, std::int64_t size, float scale) {
  float total = 0;
  std::int64_t i = 0;
  Vector sums = {};
  for (; i + TANDEM_LANES <= size; i += TANDEM_LANES) sums += load(row + i) * load(row + i);
  for (; i < size; ++i) total += row[i] * row[i];
  const float factor = scale / std::sqrt(total + sum_of(sums) + 1e-6f);
  for (i = 0; i < size; ++i) row[i] *= factor;
}

void prepare(const Recurrence& call, const PreparedTokens& to, std::int64_t t) {
  const std::int64_t token = to.first + t, dim = call.key_dim;
  for (std::int64_t h = 0; h < call.num_key_heads; ++h) {
    float* query = to.query + (t * call.num_key_heads + h) * dim;
    float* key = to.key + (t * call.num_key_heads + h) * dim;
    const auto at = [&](const HeadView& view) {
      return value_at(view.data, call.type, token * view.token_stride + h * view.head_stride);
    };
    load_values(at(call.query), call.type, dim, query);
    load_values(at(call.key), call.type, dim, key);
    if (call.is_normalised) {
      normalise(query, dim, call.scale);
      normalise(key, dim, 1);
    } else if (call.scale != 1) {
      for (std::int64_t i = 0; i < dim; ++i) query[i] *= call.scale;
    }
  }
  if (call.decay_kind == DecayKind::kByPair) return;
  if (call.decay_kind == DecayKind::kByHead) {
    for (std::int64_t h = 0; h < call.num_heads; ++h)
      to.kept[t * call.num_heads + h] = std::exp(call.decay[token * call.num_heads + h]);
    return;
  }
  for (std::int64_t h = 0; h < call.num_heads; ++h) {
    const std::int64_t from = (token * call.num_heads + h) * dim;
    const std::int64_t row = (t * call.num_heads + h) * dim;
    const std::int64_t key_head = h / (call.num_heads / call.num_key_heads);
    const float* key = to.key + (t * call.num_key_heads + key_head) * dim;
    for (std::int64_t i = 0; i < dim; ++i) {
      to.kept[row + i] = std::exp(call.decay[from + i]);
      to.kept_key[row + i] = to.kept[row + i] * key[i];
    }
  }
}

// Blocks of a head that advance together. If one register holds a whole block, a single block has
// too few independent additions, and would load a key for each register.
constexpr int kMostTogether = kBlockVectors == 1 ? 4 : 1;

// Offset of a register in a row of `Blocks` adjacent states.
inline std::int64_t vector_at(std::int64_t rows, int v) {
  return v / kBlockVectors * rows * kStateBlock + v % kBlockVectors * TANDEM_LANES;
}

// Two sets of registers for the blocks' values, so that additions are independent.
template <int Blocks>
struct BlockSums {
  Vector even[Blocks * kBlockVectors] = {}, odd[Blocks * kBlockVectors] = {};

  Vector total(int v) const { return even[v] + odd[v]; }
};

// The inputs of one token for some blocks.
template <int Blocks>
struct BlockToken {
  const float* query;
  const float* key;
  const float* next_key;  // times that token's `kept`, if it is by key
  const float* kept;  // one value, or one by key; or by value, to be multiplied by `factor`
  const float* factor;  // (blocks, key_dim, 16)
  Vector change[Blocks * kBlockVectors];  // rate * (value - key S)
};

// Decays and updates the state, and reads it for this token and for the next one's delta rule.
template <DecayKind Kind, bool IsDelta, int Blocks>
void step(float* state, std::int64_t rows, const BlockToken<Blocks>& of, BlockSums<Blocks>& result,
          BlockSums<Blocks>& recalled) {
  constexpr int kVectors = Blocks * kBlockVectors;
  const BlockToken token = of;  // copies, also of the sums, which no store can alias
  Vector sums[2][kVectors] = {}, next[2][kVectors] = {};
  const Vector kept_by_all = broadcast(Kind == DecayKind::kByHead ? token.kept[0] : 0);
  const auto step_row = [&](std::int64_t i, int parity) {
    Vector fresh[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t at = i * kStateBlock + vector_at(rows, v);
      Vector kept;
      if constexpr (Kind == DecayKind::kByHead) kept = kept_by_all;
      if constexpr (Kind == DecayKind::kByKey) kept = broadcast(token.kept[i]);
      if constexpr (Kind == DecayKind::kByPair)
        kept = exponential(load(token.kept + v * TANDEM_LANES) * load(token.factor + at));
      fresh[v] = load(state + at) * kept + token.change[v] * token.key[i];
    }
    // Stored after all loads: a load waits for a store at the same offset of another page.
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      store(state + i * kStateBlock + vector_at(rows, v), fresh[v]);
      sums[parity][v] += fresh[v] * token.query[i];
      if constexpr (IsDelta) next[parity][v] += fresh[v] * token.next_key[i];
    }
  };
  std::int64_t i = 0;
  for (; i + 2 <= rows; i += 2) {
    step_row(i, 0);
    step_row(i + 1, 1);
  }
  if (i < rows) step_row(i, 0);
  for (int v = 0; v < kVectors; ++v) {
    result.even[v] = sums[0][v];
    result.odd[v] = sums[1][v];
    recalled.even[v] = next[0][v];
    recalled.odd[v] = next[1][v];
  }
}

// Computes key S of the delta rule, adding in the same order as `step`.
template <int Blocks>
void recall(const float* state, std::int64_t rows, const float* key, BlockSums<Blocks>& recalled) {
  for (std::int64_t i = 0; i < rows; ++i) {
    Vector(&sums)[Blocks * kBlockVectors] = i % 2 == 0 ? recalled.even : recalled.odd;
    for (int v = 0; v < Blocks * kBlockVectors; ++v)
      sums[v] += load(state + i * kStateBlock + vector_at(rows, v)) * key[i];
  }
}

// The inputs of a token for the blocks of a head; the token may be new or repeated.
struct TokenInputs {
  const float *query, *key, *kept;
  const float* delta_key;
  const float* decay;  // by pair
  const void *value, *rate;
  ValueType value_type, rate_type;
};

template <DecayKind Kind>
class BlockInputs {
 public:
  BlockInputs(const Recurrence& call, const PreparedTokens& prepared, const StateSegment& segment,
              std::int64_t head, std::int64_t first_value)
      : call_(call), prepared_(prepared), segment_(segment), head_(head),
        key_head_(head / (call.num_heads / call.num_key_heads)), first_value_(first_value),
        logged_(call) {}

  // Repeated tokens come first.
  TokenInputs operator[](std::int64_t i) const {
    return i < segment_.num_again ? again(i) : fresh(segment_.first + i - segment_.num_again);
  }

 private:
  TokenInputs again(std::int64_t i) const {
    const float* at =
        call_.log.values + (segment_.slot * kMostDrafted + i) * logged_.size;
    const float* key = at + key_head_ * call_.key_dim;
    const std::int64_t kept = head_ * call_.kept_by_head();
    return {key, key, at + logged_.kept + kept,
            Kind == DecayKind::kByKey ? at + logged_.kept_key + kept : key,
            at + logged_.decay + first_value_,
            at + logged_.value + head_ * call_.value_dim + first_value_,
            at + logged_.rate + head_, ValueType::kFp32, ValueType::kFp32};
  }

  TokenInputs fresh(std::int64_t t) const {
    const std::int64_t row = t - prepared_.first;
    const std::int64_t of_key = (row * call_.num_key_heads + key_head_) * call_.key_dim;
    const std::int64_t kept = (row * call_.num_heads + head_) * call_.kept_by_head();
    return {prepared_.query + of_key, prepared_.key + of_key, prepared_.kept + kept,
            Kind == DecayKind::kByKey ? prepared_.kept_key + kept : prepared_.key + of_key,
            call_.decay + t * call_.value_dim + first_value_,
            value_at(call_.value.data, call_.type,
                     t * call_.value.token_stride + head_ * call_.value.head_stride + first_value_),
            call_.rate ? value_at(call_.rate, call_.rate_type, t * call_.num_heads + head_) : nullptr,
            call_.type, call_.rate_type};
  }

  const Recurrence& call_;
  const PreparedTokens& prepared_;
  const StateSegment& segment_;
  std::int64_t head_, key_head_, first_value_;
  LoggedToken logged_;
};

template <DecayKind Kind, bool IsDelta, int Blocks>
void recur_as(const Recurrence& call, const PreparedTokens& prepared, const StateSegment& segment,
              std::int64_t head, std::int64_t block) {
  constexpr std::int64_t kValues = Blocks * kStateBlock;
  constexpr int kVectors = Blocks * kBlockVectors;
  const std::int64_t dim = call.key_dim, first_value = block * kStateBlock;
  const std::int64_t width = std::min(kValues, call.value_dim - first_value);
  const BlockInputs<Kind> inputs(call, prepared, segment, head, first_value);
  float* state = call.states + ((segment.slot * call.num_heads + head) * call.blocks() + block) *
                                   dim * kStateBlock;
  if (segment.is_beginning) std::fill_n(state, dim * kValues, 0.0f);
  float value[kValues] = {}, out[kValues], fading[kValues] = {};
  float drafted[kMostKeyDim * kValues];
  BlockSums<Blocks> recalled;
  if constexpr (IsDelta) recall(state, dim, inputs[0].delta_key, recalled);
  const std::int64_t last = segment.num_again + segment.count - 1;
  const std::int64_t first_draft = segment.num_again + segment.num_certain;
  for (std::int64_t i = 0; i <= last; ++i) {
    if (i == first_draft) {  // drafted tokens advance a copy of the state
      std::copy_n(state, dim * kValues, drafted);
      state = drafted;
    }
    const TokenInputs now = inputs[i];
    BlockToken<Blocks> token{now.query, now.key, inputs[std::min(i + 1, last)].delta_key,
                             now.kept,  nullptr, {}};
    if constexpr (Kind == DecayKind::kByPair) {
      std::memcpy(fading, now.decay, width * sizeof(float));
      token.kept = fading;
      token.factor = call.factor + block * dim * kStateBlock;
    }
    load_values(now.value, now.value_type, width, value);
    float rate = 1;
    if (now.rate) load_values(now.rate, now.rate_type, 1, &rate);
    for (int v = 0; v < kVectors; ++v) {
      Vector change = load(value + v * TANDEM_LANES);
      if constexpr (IsDelta)
        change -=
            Kind == DecayKind::kByHead ? recalled.total(v) * token.kept[0] : recalled.total(v);
      token.change[v] = change * rate;
    }
    BlockSums<Blocks> result;
    recalled = {};
    step<Kind, IsDelta, Blocks>(state, dim, token, result, recalled);
    if (i < segment.num_again) continue;
    for (int v = 0; v < kVectors; ++v) store(out + v * TANDEM_LANES, result.total(v));
    if (call.skip)
      for (std::int64_t j = 0; j < width; ++j)
        out[j] += call.skip[head * call.value_dim + first_value + j] * value[j];
    const std::int64_t t = segment.first + i - segment.num_again;
    store_values(out, width, call.type,
                 value_at(call.out, call.type,
                          (t * call.num_heads + head) * call.value_dim + first_value));
  }
}

void note(const Recurrence& call, const PreparedTokens& prepared, std::int64_t token,
          float* logged) {
  const LoggedToken at(call);
  const std::int64_t row = token - prepared.first, heads = call.num_heads;
  const std::int64_t keys = at.kept, kept = at.kept_key - at.kept;
  std::copy_n(prepared.key + row * keys, keys, logged);
  std::copy_n(prepared.kept + row * kept, kept, logged + at.kept);
  if (call.decay_kind == DecayKind::kByKey)
    std::copy_n(prepared.kept_key + row * kept, kept, logged + at.kept_key);
  for (std::int64_t h = 0; h < heads; ++h)
    load_values(value_at(call.value.data, call.type,
                         token * call.value.token_stride + h * call.value.head_stride),
                call.type, call.value_dim, logged + at.value + h * call.value_dim);
  std::fill_n(logged + at.rate, heads, 1.0f);
  if (call.rate)
    load_values(value_at(call.rate, call.rate_type, token * heads), call.rate_type, heads,
                logged + at.rate);
  if (call.decay_kind == DecayKind::kByPair)
    std::copy_n(call.decay + token * call.value_dim, call.value_dim, logged + at.decay);
}

template <DecayKind Kind, bool IsDelta>
void recur_blocks(const Recurrence& call, const PreparedTokens& prepared,
                  const StateSegment& segment, std::int64_t head, std::int64_t begin,
                  std::int64_t end) {
  for (; begin + kMostTogether <= end; begin += kMostTogether)
    recur_as<Kind, IsDelta, kMostTogether>(call, prepared, segment, head, begin);
  for (; begin < end; ++begin) recur_as<Kind, IsDelta, 1>(call, prepared, segment, head, begin);
}

void recur(const Recurrence& call, const PreparedTokens& prepared, const StateSegment& segment,
           std::int64_t head, std::int64_t begin, std::int64_t end) {
  const auto run = [&](auto blocks) { blocks(call, prepared, segment, head, begin, end); };
  switch (call.decay_kind) {
    case DecayKind::kByHead:
      return run(call.is_delta ? recur_blocks<DecayKind::kByHead, true>
                               : recur_blocks<DecayKind::kByHead, false>);
    case DecayKind::kByKey:
      return run(call.is_delta ? recur_blocks<DecayKind::kByKey, true>
                               : recur_blocks<DecayKind::kByKey, false>);
    case DecayKind::kByPair: return run(recur_blocks<DecayKind::kByPair, false>);
  }
}

constexpr RecurrentKernels kRecurrentKernels{convolve, prepare, recur, note};
