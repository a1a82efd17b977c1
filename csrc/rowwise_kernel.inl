// The row-wise operations with whatever instructions the including file is compiled for: plain loops
// that the compiler turns into vectors. Included inside a namespace of its own.

// Rows of fp32 in scratch memory, kept by thread.
inline float* scratch_row(int which, std::int64_t cols) {
  thread_local std::vector<float> rows[3];
  std::vector<float>& row = rows[which];
  if (static_cast<std::int64_t>(row.size()) < cols) row.resize(cols);
  return row.data();
}

// What a value becomes when it is kept in a tensor of this type.
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
    const float scale = 1.0f / std::sqrt(mean_square(row, call.cols) + call.eps);
    if (call.rounds_first)
      for (std::int64_t k = 0; k < call.cols; ++k) row[k] = rounded<T>(row[k] * scale);
    else
      for (std::int64_t k = 0; k < call.cols; ++k) row[k] *= scale;
    if (call.weight) {
      const float* weight = call.weight + r % call.weight_rows * call.cols;
      for (std::int64_t k = 0; k < call.cols; ++k) row[k] *= weight[k];
    }
    if (is_gated_last) {
      if (call.rounds_first)
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
  float* x = scratch_row(0, call.dim);
  for (std::int64_t t = 0; t < call.num_tokens; ++t) {
    const float* turn = call.turns + t * call.dim;
    for (std::int64_t h = 0; h < call.num_heads; ++h) {
      load_values(value_at(call.input, T, t * call.token_stride + h * call.head_stride), T,
                  call.dim, x);
      for (std::int64_t d = 0; d < call.dim; d += 2) {
        const float real = x[d], imaginary = x[d + 1];
        x[d] = real * turn[d] - imaginary * turn[d + 1];
        x[d + 1] = real * turn[d + 1] + imaginary * turn[d];
      }
      store_values(x, call.dim, T, value_at(call.out, T, (t * call.num_heads + h) * call.dim));
    }
  }
}

// Calls function(offset of input, offset of output) for each run of values.
template <typename Function>
void each_run(const Copy& call, const Function& function) {
  for (std::int64_t a = 0; a < call.sizes[0]; ++a)
    for (std::int64_t b = 0; b < call.sizes[1]; ++b)
      for (std::int64_t c = 0; c < call.sizes[2]; ++c)
        function(a * call.strides[0] + b * call.strides[1] + c * call.strides[2],
                 a * call.out_strides[0] + b * call.out_strides[1] + c * call.out_strides[2]);
}

inline void copy_values(const Copy& call) {
  const std::int64_t width = call.sizes[3];
  float* row = scratch_row(0, width);
  each_run(call, [&](std::int64_t from, std::int64_t to) {
    const void* input = value_at(call.input, call.type, from);
    void* out = value_at(call.out, call.out_type, to);
    if (call.type == call.out_type) {
      std::memcpy(out, input, width * value_bytes(call.type));
    } else {
      load_values(input, call.type, width, row);
      store_values(row, width, call.out_type, out);
    }
  });
}

inline void load_apart(const void* from, ValueType type, std::int64_t stride, std::int64_t count,
                       float* to) {
  if (stride == 1) return load_values(from, type, count, to);
  for (std::int64_t i = 0; i < count; ++i)
    load_values(value_at(from, type, i * stride), type, 1, to + i);
}

inline void combine_row(ElementwiseKind kind, std::int64_t count, float* a, const float* b) {
  switch (kind) {
    case ElementwiseKind::kAdd:
      for (std::int64_t i = 0; i < count; ++i) a[i] += b[i];
      return;
    case ElementwiseKind::kMultiply:
      for (std::int64_t i = 0; i < count; ++i) a[i] *= b[i];
      return;
    case ElementwiseKind::kSubtract:
      for (std::int64_t i = 0; i < count; ++i) a[i] -= b[i];
      return;
    case ElementwiseKind::kSilu:
      for (std::int64_t i = 0; i < count; ++i) a[i] /= 1.0f + std::exp(-a[i]);
      return;
    case ElementwiseKind::kSigmoid:
      for (std::int64_t i = 0; i < count; ++i) a[i] = 1.0f / (1.0f + std::exp(-a[i]));
      return;
    case ElementwiseKind::kSoftplus:  // above 20 it is `a` itself to the last digit
      for (std::int64_t i = 0; i < count; ++i) a[i] = a[i] > 20 ? a[i] : std::log1p(std::exp(a[i]));
  }
}

inline void combine_values(const Elementwise& call) {
  constexpr std::int64_t kPart = 1024;  // stays in the first-level cache
  float a[kPart], b[kPart];
  const Four &sizes = call.sizes, &from = call.a_strides, &other = call.b_strides;
  const bool is_single = has_one_operand(call.kind);
  if (!is_single && call.b == nullptr) std::fill_n(b, kPart, call.scalar);
  std::int64_t done = 0;
  for (std::int64_t i = 0; i < sizes[0] * sizes[1] * sizes[2]; ++i) {
    const std::int64_t x = i / (sizes[1] * sizes[2]), y = i / sizes[2] % sizes[1], z = i % sizes[2];
    for (std::int64_t first = 0; first < sizes[3]; first += kPart) {
      const std::int64_t count = std::min(kPart, sizes[3] - first);
      const auto at = [&](const Four& s) {
        return x * s[0] + y * s[1] + z * s[2] + first * s[3];
      };
      load_apart(value_at(call.a, call.a_type, at(from)), call.a_type, from[3], count, a);
      if (!is_single && call.b != nullptr)
        load_apart(value_at(call.b, call.b_type, at(other)), call.b_type, other[3], count, b);
      combine_row(call.kind, count, a, b);
      store_values(a, count, call.type, value_at(call.out, call.type, done));
      done += count;
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
    by_type<RotaryPairs, rotate_pairs<ValueType::kFp32>, rotate_pairs<ValueType::kBf16>>,
    combine_values,
    copy_values};
