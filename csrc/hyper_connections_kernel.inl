// Hyper-connections for one width of registers. Each instruction set's file includes it, after
// vectors.inl and inside its own namespace, with TANDEM_LANES set to the floats per register.

using Halves = std::uint16_t __attribute__((vector_size(TANDEM_LANES * 2)));

template <ValueType T>
inline Vector load_as_fp32(const void* values, std::int64_t index) {
  if constexpr (T == ValueType::kFp32) return load(static_cast<const float*>(values) + index);
  Halves bits;
  std::memcpy(&bits, static_cast<const std::uint16_t*>(values) + index, sizeof bits);
  const Integers wide = __builtin_convertvector(bits, Integers) << 16;
  Vector v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

// Adds to sums[t][r] the products of `count` values of Tokens tokens with Rows rows; tokens and
// rows are `stride` values apart.
template <ValueType X, ValueType M, int Tokens, int Rows>
inline void multiply_some(const void* x, const void* matrix, std::int64_t stride,
                          std::int64_t count, float (&sums)[Tokens][Rows]) {
  Vector totals[Tokens][Rows] = {};
  std::int64_t k = 0;
  for (; k + TANDEM_LANES <= count; k += TANDEM_LANES) {
    Vector left[Tokens];
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) left[t] = load_as_fp32<X>(x, t * stride + k);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vector right = load_as_fp32<M>(matrix, r * stride + k);
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) totals[t][r] += left[t] * right;
    }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int r = 0; r < Rows; ++r) {
      float a, b;
      sums[t][r] = sum_of(totals[t][r]);
      for (std::int64_t i = k; i < count; ++i) {
        load_values(value_at(x, X, t * stride + i), X, 1, &a);
        load_values(value_at(matrix, M, r * stride + i), M, 1, &b);
        sums[t][r] += a * b;
      }
    }
}

// Multiplies Tokens tokens by all rows and by themselves.
template <ValueType X, ValueType M, int Tokens>
inline void multiply_tokens(const MixIn& call, const void* x, std::int64_t first_value,
                            std::int64_t count, float* sums, std::int64_t stride) {
  constexpr int kRows = 4;
  const std::int64_t values = call.num_values(), rows = call.num_rows();
  const auto write = [&]<int Rows>(std::int64_t row, const float (&found)[Tokens][Rows]) {
    for (int t = 0; t < Tokens; ++t)
      for (int r = 0; r < Rows; ++r) sums[t * stride + row + r] = found[t][r];
  };
  std::int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    float found[Tokens][kRows];
    multiply_some<X, M>(x, value_at(call.matrix, M, row * values + first_value), values, count,
                        found);
    write(row, found);
  }
  for (; row < rows; ++row) {
    float found[Tokens][1];
    multiply_some<X, M>(x, value_at(call.matrix, M, row * values + first_value), values, count,
                        found);
    write(row, found);
  }
  for (int t = 0; t < Tokens; ++t) {
    float found[1][1];
    const void* own = value_at(x, X, t * values);
    multiply_some<X, X>(own, own, values, count, found);
    sums[t * stride + rows] = found[0][0];
  }
}

template <ValueType X, ValueType M>
void multiply_typed(const MixIn& call, std::int64_t first_token, std::int64_t num_tokens,
                    std::int64_t first_value, std::int64_t count, float* sums,
                    std::int64_t stride) {
  constexpr int kTokens = 4;
  const auto at = [&](std::int64_t t) {
    return value_at(call.streams, X, (first_token + t) * call.num_values() + first_value);
  };
  std::int64_t t = 0;
  for (; t + kTokens <= num_tokens; t += kTokens)
    multiply_tokens<X, M, kTokens>(call, at(t), first_value, count, sums + t * stride, stride);
  for (; t < num_tokens; ++t)
    multiply_tokens<X, M, 1>(call, at(t), first_value, count, sums + t * stride, stride);
}

void multiply(const MixIn& call, std::int64_t first_token, std::int64_t num_tokens,
              std::int64_t first_value, std::int64_t count, float* sums, std::int64_t stride) {
  constexpr ValueType kFp32 = ValueType::kFp32, kBf16 = ValueType::kBf16;
  const bool is_wide = call.type == kFp32;
  const auto run = call.matrix_type == kFp32
                       ? (is_wide ? multiply_typed<kFp32, kFp32> : multiply_typed<kBf16, kFp32>)
                       : (is_wide ? multiply_typed<kFp32, kBf16> : multiply_typed<kBf16, kBf16>);
  run(call, first_token, num_tokens, first_value, count, sums, stride);
}

// Values of a stream that are in the first-level cache together.
constexpr std::int64_t kTile = 256;

void collapse(const MixIn& call, std::int64_t token, const float* weights) {
  float values[kTile], sums[kTile];
  for (std::int64_t first = 0; first < call.dim; first += kTile) {
    const std::int64_t count = std::min(kTile, call.dim - first);
    std::fill_n(sums, count, 0.0f);
    for (std::int64_t n = 0; n < call.num_streams; ++n) {
      const std::int64_t at = (token * call.num_streams + n) * call.dim + first;
      load_values(value_at(call.streams, call.type, at), call.type, count, values);
      for (std::int64_t d = 0; d < count; ++d) sums[d] += weights[n] * values[d];
    }
    store_values(sums, count, call.type, value_at(call.out, call.type, token * call.dim + first));
  }
}

template <ValueType T>
inline float as_kept(float value) {
  return T == ValueType::kBf16 ? bf16_to_float(float_to_bf16(value)) : value;
}

template <ValueType T>
void mix_token(const MixOut& call, std::int64_t token) {
  const std::int64_t n = call.num_streams;
  float weights[kMostStreams * (kMostStreams + 1)];
  for (std::int64_t i = 0; i < n * (n + 1); ++i)
    weights[i] = as_kept<T>(call.weights[token * n * (n + 1) + i]);
  const float* mixture = weights + n;
  float y[kTile], streams[kMostStreams][kTile], sums[kTile];
  for (std::int64_t first = 0; first < call.dim; first += kTile) {
    const std::int64_t count = std::min(kTile, call.dim - first);
    const auto at = [&](std::int64_t stream) { return (token * n + stream) * call.dim + first; };
    load_values(value_at(call.y, T, token * call.dim + first), T, count, y);
    for (std::int64_t from = 0; from < n; ++from)
      load_values(value_at(call.streams, T, at(from)), T, count, streams[from]);
    for (std::int64_t to = 0; to < n; ++to) {
      std::fill_n(sums, count, 0.0f);
      for (std::int64_t from = 0; from < n; ++from)
        for (std::int64_t d = 0; d < count; ++d) sums[d] += mixture[from * n + to] * streams[from][d];
      for (std::int64_t d = 0; d < count; ++d)
        sums[d] = as_kept<T>(weights[to] * y[d]) + as_kept<T>(sums[d]);
      store_values(sums, count, T, value_at(call.out, T, at(to)));
    }
  }
}

void mix_out(const MixOut& call, std::int64_t first_token, std::int64_t num_tokens) {
  const auto mix = call.type == ValueType::kBf16 ? mix_token<ValueType::kBf16>
                                                 : mix_token<ValueType::kFp32>;
  for (std::int64_t t = first_token; t < first_token + num_tokens; ++t) mix(call, t);
}

constexpr HyperKernels kHyperKernels{multiply, collapse, mix_out};
