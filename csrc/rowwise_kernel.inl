// The row-wise operations in the including file's instruction set: plain loops that the compiler
// vectorizes. Included inside a namespace.

// A thread's scratch memory for fp32 rows.
inline float* scratch_row(int which, std::int64_t cols) {
  thread_local std::vector<float> rows[3];
  std::vector<float>& row = rows[which];
  if (static_cast<std::int64_t>(row.size()) < cols) row.resize(cols);
  return row.data();
}

// Rounds a value as storing it in a tensor of this type does.
template <ValueType T>
inline float rounded(float value) {
  return T == ValueType::kBf16 ? bf16_to_float(float_to_bf16(value)) : value;
}

inline float mean_square(const float* row, std::int64_t cols) {
  constexpr std::int64_t kLanes = 32;  // independent sums, which the compiler keeps in registers
  float sums[kLanes] = {};
  const std::int64_t whole = cols / kLanes * kLanes;
  for (std::int64_t k = 0; k < whole; k += kLanes)
    for (std::int64_t i = 0; i < kLanes; ++i) sums[i] += row[k + i] * row[k + i];
  for (std::int64_t k = whole; k < cols; ++k) sums[0] += row[k] * row[k];
  float total = 0;
  for (const float sum : sums) total += sum;
  return total / static_cast<float>(cols);
}

// Multiplies a row by its gate.
template <ValueType T>
void gate_row(const RmsNorm& call, std::int64_t r, float* row) {
  float* gate = scratch_row(1, call.cols);
  load_values(value_at(call.gate, T, r * call.gate_stride), T, call.cols, gate);
  const bool is_silu = call.gate_kind != GateKind::kSigmoidAfter;
  for (std::int64_t k = 0; k < call.cols; ++k)
    row[k] *= (is_silu ? gate[k] : 1.0f) / (1.0f + std::exp(-gate[k]));
}

template <ValueType T>
void norm_rows(const RmsNorm& call) {
  float* row = scratch_row(0, call.cols);
  const bool is_gated_first = call.gate_kind == GateKind::kSiluBefore;
  const bool is_gated_last = call.gate_kind != GateKind::kNone && !is_gated_first;
  for (std::int64_t r = 0; r < call.num_rows; ++r) {
    load_values(value_at(call.input, T, r * call.input_stride), T, call.cols, row);
    if (is_gated_first) gate_row<T>(call, r, row);
    float scale = 1.0f / std::sqrt(mean_square(row, call.cols) + call.eps);
    if (call.rounding == NormRounding::kFactor) scale = rounded<T>(scale);
    if (call.rounding == NormRounding::kRow)
      for (std::int64_t k = 0; k < call.cols; ++k) row[k] = rounded<T>(row[k] * scale);
    else
      for (std::int64_t k = 0; k < call.cols; ++k) row[k] *= scale;
    if (call.weight) {
      const float* weight = call.weight + r % call.weight_rows * call.cols;
      for (std::int64_t k = 0; k < call.cols; ++k) row[k] *= weight[k];
    }
    if (is_gated_last) {
      if (call.rounding == NormRounding::kRow)
        for (std::int64_t k = 0; k < call.cols; ++k) row[k] = rounded<T>(row[k]);
      gate_row<T>(call, r, row);
    }
    store_values(row, call.cols, T, value_at(call.out, T, r * call.cols));
  }
}

template <ValueType T>
void rotate_heads(const Rotary& call) {
  float *x = scratch_row(0, call.dim), *cos = scratch_row(1, call.dim);
  float* sin = scratch_row(2, call.dim);
  const std::int64_t half = call.rotated / 2;
  for (std::int64_t t = 0; t < call.num_tokens; ++t) {
    load_values(value_at(call.cos, T, t * call.rotated), T, call.rotated, cos);
    load_values(value_at(call.sin, T, t * call.rotated), T, call.rotated, sin);
    for (std::int64_t h = 0; h < call.num_heads; ++h) {
      load_values(value_at(call.input, T, t * call.token_stride + h * call.head_stride), T,
                  call.dim, x);
      float* second_half = x + half;
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
      for (std::int64_t d = 0; d < half; ++d) {
        const float first = x[d], second = second_half[d];
        x[d] = rounded<T>(first * cos[d]) + rounded<T>(-second * sin[d]);
        second_half[d] = rounded<T>(second * cos[d + half]) + rounded<T>(first * sin[d + half]);
      }
      store_values(x, call.dim, T, value_at(call.out, T, (t * call.num_heads + h) * call.dim));
    }
  }
}

template <ValueType T>
void rotate_pairs(const RotaryPairs& call) {
  float* x = scratch_row(0, call.turned);
  const std::int64_t kept = call.dim - call.turned;
  for (std::int64_t t = 0; t < call.num_tokens; ++t) {
    const float* turn = call.turns + t * call.turned;
    for (std::int64_t h = 0; h < call.num_heads; ++h) {
      const void* from = value_at(call.input, T, t * call.token_stride + h * call.head_stride);
      void* to = value_at(call.out, T, (t * call.num_heads + h) * call.dim);
      std::memcpy(to, from, kept * value_bytes(T));
      load_values(value_at(from, T, kept), T, call.turned, x);
      for (std::int64_t d = 0; d < call.turned; d += 2) {
        const float real = x[d], imaginary = x[d + 1];
        x[d] = real * turn[d] - imaginary * turn[d + 1];
        x[d + 1] = real * turn[d + 1] + imaginary * turn[d];
      }
      store_values(x, call.turned, T, value_at(to, T, kept));
    }
  }
}

template <typename Call, void (*fp32)(const Call&), void (*bf16)(const Call&)>
void by_type(const Call& call) {
  call.type == ValueType::kBf16 ? bf16(call) : fp32(call);
}

constexpr RowKernels kRowKernels{
    by_type<RmsNorm, norm_rows<ValueType::kFp32>, norm_rows<ValueType::kBf16>>,
    by_type<Rotary, rotate_heads<ValueType::kFp32>, rotate_heads<ValueType::kBf16>>,
    by_type<RotaryPairs, rotate_pairs<ValueType::kFp32>, rotate_pairs<ValueType::kBf16>>};
