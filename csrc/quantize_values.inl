// Numbers and their bits for quantising, and loading weights into registers: a lane is a row, a
// register is a column of TANDEM_LANES rows. Included after vectors.inl.

constexpr int kParts = kBlockRows / TANDEM_LANES;  // registers per column of a block
constexpr std::int64_t kWidest = kSuperCols;  // columns that are rounded together, at most
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
constexpr std::int32_t kInfinity = 0x7F800000;

inline Integers bits_of(Vector v) {
  Integers bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

inline Vector from_bits(Integers bits) {
  Vector v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline Vector smaller(Vector a, Vector b) { return a < b ? a : b; }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }
inline Vector size_of(Vector x) { return from_bits(bits_of(x) & 0x7FFFFFFF); }
inline Vector rounded(Vector x) { return (x + kMagic) - kMagic; }  // |x| < 2^22
inline Vector whole(Vector x, float low, float high) {
  return rounded(smaller(larger(x, broadcast(low)), broadcast(high)));
}
inline Integers to_integers(Vector x) { return __builtin_convertvector(x, Integers); }

inline bool any(Integers mask) {
  std::int32_t lanes[TANDEM_LANES], found = 0;
  std::memcpy(lanes, &mask, sizeof lanes);
  for (const std::int32_t lane : lanes) found |= lane;
  return found != 0;
}

inline bool all_finite(Vector x) { return !any((bits_of(x) & 0x7FFFFFFF) >= kInfinity); }

// 1 / x; 0 if x is 0 or almost, because such groups are zero.
inline Vector inverse(Vector x) {
  const Vector result = 1.0f / x;
  return (bits_of(result) & 0x7FFFFFFF) >= kInfinity ? broadcast(0.0f) : result;
}

// The nearest fp16 number, ties to even; infinity beyond the largest.
inline Vector to_half(Vector x) {
  const Integers bits = bits_of(x), sign = bits & ~0x7FFFFFFF, all = bits & 0x7FFFFFFF;
  const Integers most = Integers{} + 0x47800000;  // 65,536
  const Integers size = all < most ? all : most;  // limits NaN, too
  const Integers normal = (size + 0xFFF + ((size >> 13) & 1)) & ~0x1FFF;
  const Integers subnormal = bits_of((from_bits(size) + 0.5f) - 0.5f);  // in steps of 2^-24
  Integers result = size < 0x38800000 ? subnormal : normal;             // 2^-14
  const Integers infinite = Integers{} + kInfinity;
  result = result >= most ? infinite : result;
  return from_bits(result | sign);
}

// The bits of numbers that are exact in fp16.
inline Integers half_bits(Vector x) {
  const Integers bits = bits_of(x), size = bits & 0x7FFFFFFF;
  const Integers normal = (size >> 13) - (112 << 10);
  const Integers subnormal = to_integers(from_bits(size) * 16777216.0f);
  const Integers infinite = Integers{} + 0x7C00;
  const Integers result =
      size < 0x38800000 ? subnormal : (size >= kInfinity ? infinite : normal);
  return result | ((bits >> 16) & 0x8000);
}

inline Integers to_bf16_bits(Vector x) {
  const Integers bits = bits_of(x);
  return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF;
}

inline Integers to_e4m3_bits(Vector x) {  // |x| <= 448
  const Integers bits = bits_of(x), size = bits & 0x7FFFFFFF;
  const Integers normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3);
  const Integers subnormal = to_integers(rounded(from_bits(size) * 512.0f));
  const Integers result = size < 0x3C800000 ? subnormal : normal;  // 2^-6
  return result | ((bits >> 24) & 0x80);
}

// a0 b0 a1 b1 ...: interleaves the first halves of two registers, and the second halves.
#if TANDEM_LANES == 16
#define TANDEM_FIRST 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define TANDEM_SECOND 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif TANDEM_LANES == 8
#define TANDEM_FIRST 0, 8, 1, 9, 2, 10, 3, 11
#define TANDEM_SECOND 4, 12, 5, 13, 6, 14, 7, 15
#else
#define TANDEM_FIRST 0, 4, 1, 5
#define TANDEM_SECOND 2, 6, 3, 7
#endif
#if __has_builtin(__builtin_shufflevector)
#define TANDEM_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC 11
#define TANDEM_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Integers{__VA_ARGS__})
#endif

// Transposes rows to columns: each round interleaves two halves, like shuffling cards.
inline void transpose(Integers (&v)[TANDEM_LANES]) {
  for (int round = 1; round < TANDEM_LANES; round *= 2) {
    Integers dealt[TANDEM_LANES];
    for (int i = 0; i < TANDEM_LANES / 2; ++i) {
      dealt[2 * i] = TANDEM_SHUFFLE(v[i], v[i + TANDEM_LANES / 2], TANDEM_FIRST);
      dealt[2 * i + 1] = TANDEM_SHUFFLE(v[i], v[i + TANDEM_LANES / 2], TANDEM_SECOND);
    }
    std::copy(dealt, dealt + TANDEM_LANES, v);
  }
}

// Types of the source: one value, and the number of columns in a row's dword.
struct Fp32 {
  float value;
  static constexpr int kPerDword = 1;
  float to_float() const { return value; }
  static void widen(Integers dwords, Vector* columns) { columns[0] = from_bits(dwords); }
};

struct Bf16 {
  std::uint16_t bits;
  static constexpr int kPerDword = 2;
  float to_float() const { return bf16_to_float(bits); }
  static void widen(Integers dwords, Vector* columns) {
    columns[0] = from_bits(dwords << 16);
    columns[1] = from_bits(dwords & ~0xFFFF);
  }
};

struct Fp16 {
  std::uint16_t bits;
  static constexpr int kPerDword = 2;
  float to_float() const { return half_to_float(bits); }
  static Vector of(Integers bits) {
    const Integers size = (bits & 0x7FFF) << 13, infinite = Integers{} + kInfinity;
    const Integers scaled = bits_of(from_bits(size) * 0x1p112f);  // exact
    return from_bits(scaled | (size >= 0x0F800000 ? infinite : Integers{}) | (bits & 0x8000) << 16);
  }
  static void widen(Integers dwords, Vector* columns) {
    columns[0] = of(dwords & 0xFFFF);
    columns[1] = of((dwords >> 16) & 0xFFFF);
  }
};

// The weights of some columns of a part's rows, zeros beyond the matrix: tile[column] has its rows.
template <typename Value>
void load_values(const QuantizeCall& call, std::int64_t row, std::int64_t col, std::int64_t count,
                 Vector* tile) {
  constexpr int kColumns = TANDEM_LANES * Value::kPerDword;  // columns of one row in a register
  const std::int64_t rows = std::clamp<std::int64_t>(call.rows - row, 0, TANDEM_LANES);
  const std::int64_t cols = std::clamp<std::int64_t>(call.cols - col, 0, count);
  const auto* from = static_cast<const Value*>(call.source) + row * call.row_stride +
                     col * call.col_stride;
  std::int64_t first = 0;
  if (rows == TANDEM_LANES && call.col_stride == 1)
    for (; first + kColumns <= cols; first += kColumns) {
      Integers v[TANDEM_LANES];
      for (int r = 0; r < TANDEM_LANES; ++r)
        std::memcpy(&v[r], from + r * call.row_stride + first, sizeof v[r]);
      transpose(v);
      for (int i = 0; i < TANDEM_LANES; ++i)
        Value::widen(v[i], tile + first + i * Value::kPerDword);
    }
  auto* to = reinterpret_cast<float*>(tile);
  std::fill(to + first * TANDEM_LANES, to + count * TANDEM_LANES, 0.0f);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = first; c < cols; ++c)
      to[c * TANDEM_LANES + r] = from[r * call.row_stride + c * call.col_stride].to_float();
}

void load_tile(const QuantizeCall& call, std::int64_t row, std::int64_t col, std::int64_t count,
               Vector* tile) {
  switch (call.type) {
    case SourceType::kFp32: return load_values<Fp32>(call, row, col, count, tile);
    case SourceType::kBf16: return load_values<Bf16>(call, row, col, count, tile);
    case SourceType::kFp16: return load_values<Fp16>(call, row, col, count, tile);
  }
}
