// Conversion of tensors' values to rows of fp32, and elementwise operations, in the including
// file's instruction set. Included inside a namespace, after vectors.inl.

// Values per part, which stay in the first-level cache; whole registers.
constexpr std::int64_t kPart = 1024;

struct Row {
  alignas(64) float values[kPart];
};

template <typename T>
inline void load_numbers(const void* from, std::int64_t stride, std::int64_t count, float* to) {
  const auto* numbers = static_cast<const T*>(from);
  if (stride == 1)
    for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(numbers[i]);
  else
    for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(numbers[i * stride]);
}

inline void load_bf16(const void* from, std::int64_t stride, std::int64_t count, float* to) {
  const auto* bits = static_cast<const std::uint16_t*>(from);
  if (stride == 1)
    for (std::int64_t i = 0; i < count; ++i) to[i] = bf16_to_float(bits[i]);
  else
    for (std::int64_t i = 0; i < count; ++i) to[i] = bf16_to_float(bits[i * stride]);
}

inline void load_row(ElementType type, const void* from, std::int64_t stride, std::int64_t count,
                     float* to) {
  switch (type) {
    case ElementType::kFp32: return load_numbers<float>(from, stride, count, to);
    case ElementType::kBf16: return load_bf16(from, stride, count, to);
    case ElementType::kInt64: return load_numbers<std::int64_t>(from, stride, count, to);
    case ElementType::kInt32: return load_numbers<std::int32_t>(from, stride, count, to);
    case ElementType::kBool: return load_numbers<std::uint8_t>(from, stride, count, to);
  }
}

template <typename T, typename Function>
inline void store_numbers(void* to, std::int64_t stride, std::int64_t count, const float* from,
                          const Function& as) {
  auto* numbers = static_cast<T*>(to);
  if (stride == 1)
    for (std::int64_t i = 0; i < count; ++i) numbers[i] = as(from[i]);
  else
    for (std::int64_t i = 0; i < count; ++i) numbers[i * stride] = as(from[i]);
}

inline void store_row(ElementType type, void* to, std::int64_t stride, std::int64_t count,
                      const float* from) {
  switch (type) {
    case ElementType::kFp32:
      return store_numbers<float>(to, stride, count, from, [](float x) { return x; });
    case ElementType::kBf16:
      return store_numbers<std::uint16_t>(to, stride, count, from, float_to_bf16);
    case ElementType::kInt64:
      return store_numbers<std::int64_t>(to, stride, count, from,
                                         [](float x) { return static_cast<std::int64_t>(x); });
    case ElementType::kInt32:
      return store_numbers<std::int32_t>(to, stride, count, from,
                                         [](float x) { return static_cast<std::int32_t>(x); });
    case ElementType::kBool:
      return store_numbers<std::uint8_t>(to, stride, count, from,
                                         [](float x) { return x != 0 ? 1 : 0; });
  }
}

inline const void* element_at(const void* data, ElementType type, std::int64_t index) {
  return static_cast<const std::uint8_t*>(data) + index * element_bytes(type);
}

inline void* element_at(void* data, ElementType type, std::int64_t index) {
  return static_cast<std::uint8_t*>(data) + index * element_bytes(type);
}

// Offset in values of element (a, b, c, d).
inline std::int64_t offset_of(const Four& strides, const Four& at) {
  return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2] + at[3] * strides[3];
}

// Fills a row with values from `at` on, along the last dimension.
inline void load_operand(const Operand& x, const Four& at, std::int64_t count, float* to) {
  if (x.data == nullptr) return;  // already filled with the scalar
  load_row(x.type, element_at(x.data, x.type, offset_of(x.strides, at)), x.strides[3], count, to);
}

// Calls function(index of the row, its coordinates) for each row of the last dimension.
template <typename Function>
inline void each_row(const Four& sizes, const Function& function) {
  std::int64_t row = 0;
  for (std::int64_t a = 0; a < sizes[0]; ++a)
    for (std::int64_t b = 0; b < sizes[1]; ++b)
      for (std::int64_t c = 0; c < sizes[2]; ++c) function(row++, Four{a, b, c, 0});
}

template <typename Function>
inline void map_vectors(std::int64_t count, float* a, const Function& function) {
  for (std::int64_t i = 0; i < count; i += TANDEM_LANES) store(a + i, function(load(a + i)));
}

template <typename Function>
inline void map_one(std::int64_t count, float* a, const Function& function) {
  for (std::int64_t i = 0; i < count; ++i) a[i] = function(a[i]);
}

template <typename Function>
inline void map_two(std::int64_t count, float* a, const float* b, const Function& function) {
  for (std::int64_t i = 0; i < count; ++i) a[i] = function(a[i], b[i]);
}

inline Vector sigmoid(Vector x) {
  const Vector e = exponential(x < 0 ? x : -x);
  return (x < 0 ? e : broadcast(1.0f)) / (1.0f + e);
}

inline Vector gelu_tanh(Vector x) {
  return 0.5f * x * (1.0f + tangent(0.7978845608f * (x + 0.044715f * x * x * x)));
}

inline void change(ElementwiseKind kind, std::int64_t n, float* a) {
  using Kind = ElementwiseKind;
  switch (kind) {
    case Kind::kSilu: return map_vectors(n, a, [](Vector x) { return x * sigmoid(x); });
    case Kind::kSigmoid: return map_vectors(n, a, [](Vector x) { return sigmoid(x); });
    case Kind::kSoftplus:  // above 20 it equals `x` to the last digit
      return map_one(n, a, [](float x) { return x > 20 ? x : std::log1p(std::exp(x)); });
    case Kind::kGelu:
      return map_one(n, a, [](float x) { return 0.5f * x * (1 + std::erf(x * 0.70710678f)); });
    case Kind::kGeluTanh: return map_vectors(n, a, gelu_tanh);
    case Kind::kRelu: return map_one(n, a, [](float x) { return x < 0 ? 0.0f : x; });
    case Kind::kExp: return map_one(n, a, [](float x) { return std::exp(x); });
    case Kind::kLog: return map_one(n, a, [](float x) { return std::log(x); });
    case Kind::kLog1p: return map_one(n, a, [](float x) { return std::log1p(x); });
    case Kind::kSin: return map_one(n, a, [](float x) { return std::sin(x); });
    case Kind::kCos: return map_one(n, a, [](float x) { return std::cos(x); });
    case Kind::kTanh: return map_vectors(n, a, tangent);
    case Kind::kNegate: return map_one(n, a, [](float x) { return -x; });
    case Kind::kAbs: return map_one(n, a, [](float x) { return std::fabs(x); });
    case Kind::kSqrt: return map_one(n, a, [](float x) { return std::sqrt(x); });
    case Kind::kRsqrt: return map_one(n, a, [](float x) { return 1.0f / std::sqrt(x); });
    case Kind::kReciprocal: return map_one(n, a, [](float x) { return 1.0f / x; });
    case Kind::kFloor: return map_one(n, a, [](float x) { return std::floor(x); });
    case Kind::kNot: return map_one(n, a, [](float x) { return x == 0 ? 1.0f : 0.0f; });
    default: return;  // a copy
  }
}

inline void join(ElementwiseKind kind, std::int64_t n, float* a, const float* b) {
  using Kind = ElementwiseKind;
  switch (kind) {
    case Kind::kAdd: return map_two(n, a, b, [](float x, float y) { return x + y; });
    case Kind::kMultiply: return map_two(n, a, b, [](float x, float y) { return x * y; });
    case Kind::kSubtract: return map_two(n, a, b, [](float x, float y) { return x - y; });
    case Kind::kDivide: return map_two(n, a, b, [](float x, float y) { return x / y; });
    case Kind::kGreater:  // keeps NaN
      return map_two(n, a, b, [](float x, float y) { return x < y || y != y ? y : x; });
    case Kind::kLess: return map_two(n, a, b, [](float x, float y) { return x > y || y != y ? y : x; });
    case Kind::kPower: return map_two(n, a, b, [](float x, float y) { return std::pow(x, y); });
    case Kind::kIsGreater: return map_two(n, a, b, [](float x, float y) { return x > y ? 1.f : 0.f; });
    case Kind::kIsGreaterEqual:
      return map_two(n, a, b, [](float x, float y) { return x >= y ? 1.f : 0.f; });
    case Kind::kIsLess: return map_two(n, a, b, [](float x, float y) { return x < y ? 1.f : 0.f; });
    case Kind::kIsLessEqual:
      return map_two(n, a, b, [](float x, float y) { return x <= y ? 1.f : 0.f; });
    case Kind::kIsEqual: return map_two(n, a, b, [](float x, float y) { return x == y ? 1.f : 0.f; });
    case Kind::kIsUnequal: return map_two(n, a, b, [](float x, float y) { return x != y ? 1.f : 0.f; });
    case Kind::kAnd:
      return map_two(n, a, b, [](float x, float y) { return x != 0 && y != 0 ? 1.f : 0.f; });
    case Kind::kOr:
      return map_two(n, a, b, [](float x, float y) { return x != 0 || y != 0 ? 1.f : 0.f; });
    default: return;
  }
}

inline void join(ElementwiseKind kind, std::int64_t n, float* a, const float* b, const float* c) {
  if (kind == ElementwiseKind::kWhere) {
    for (std::int64_t i = 0; i < n; ++i) a[i] = a[i] != 0 ? b[i] : c[i];
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {  // keeps NaN
    const float x = a[i] < b[i] ? b[i] : a[i];
    a[i] = x > c[i] ? c[i] : x;
  }
}

// Whether values are copied bit by bit.
inline bool is_plain_copy(const Elementwise& call) {
  return call.kind == ElementwiseKind::kCopy && call.a.data && call.a.type == call.out.type;
}

template <typename T>
inline void copy_numbers(const void* from, std::int64_t stride, std::int64_t count, void* to,
                         std::int64_t out_stride) {
  const auto* read = static_cast<const T*>(from);
  auto* written = static_cast<T*>(to);
  if (stride == 1 && out_stride == 1) std::memmove(written, read, count * sizeof(T));
  else
    for (std::int64_t i = 0; i < count; ++i) written[i * out_stride] = read[i * stride];
}

inline void copy_values(const Elementwise& call) {
  each_row(call.sizes, [&](std::int64_t, const Four& at) {
    const void* from = element_at(call.a.data, call.a.type, offset_of(call.a.strides, at));
    void* to = element_at(call.out.data, call.out.type, offset_of(call.out.strides, at));
    const std::int64_t count = call.sizes[3], stride = call.a.strides[3];
    const std::int64_t out_stride = call.out.strides[3];
    switch (element_bytes(call.out.type)) {
      case 1: return copy_numbers<std::uint8_t>(from, stride, count, to, out_stride);
      case 2: return copy_numbers<std::uint16_t>(from, stride, count, to, out_stride);
      case 4: return copy_numbers<std::uint32_t>(from, stride, count, to, out_stride);
      default: return copy_numbers<std::uint64_t>(from, stride, count, to, out_stride);
    }
  });
}

inline void combine_values(const Elementwise& call) {
  const Four& sizes = call.sizes;
  const auto target = [&](const Four& at) {
    return element_at(call.out.data, call.out.type, offset_of(call.out.strides, at));
  };
  if (is_plain_copy(call)) return copy_values(call);
  const int operands = num_operands(call.kind);
  Row a, b, c;
  if (operands > 1 && call.b.data == nullptr) std::fill_n(b.values, kPart, call.b.scalar);
  if (operands > 2 && call.c.data == nullptr) std::fill_n(c.values, kPart, call.c.scalar);
  each_row(sizes, [&](std::int64_t, Four at) {
    for (; at[3] < sizes[3]; at[3] += kPart) {
      const std::int64_t count = std::min(kPart, sizes[3] - at[3]);
      if (call.a.data) load_operand(call.a, at, count, a.values);
      else
        std::fill_n(a.values, count, call.a.scalar);  // again: the result overwrites it
      if (operands > 1) load_operand(call.b, at, count, b.values);
      if (operands > 2) load_operand(call.c, at, count, c.values);
      if (operands == 1) change(call.kind, count, a.values);
      if (operands == 2) join(call.kind, count, a.values, b.values);
      if (operands == 3) join(call.kind, count, a.values, b.values, c.values);
      store_row(call.out.type, target(at), call.out.strides[3], count, a.values);
    }
  });
}
