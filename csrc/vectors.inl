// Registers of TANDEM_LANES floats and some functions on them, for kernels that are compiled once
// per instruction set. Included inside a namespace, after <immintrin.h> if there are 16 lanes.

using Vector = float __attribute__((vector_size(TANDEM_LANES * 4)));
using Integers = std::int32_t __attribute__((vector_size(TANDEM_LANES * 4)));

inline Vector load(const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

inline Integers load_dwords(const std::uint8_t* from) {
  Integers v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Vector broadcast(float x) { return Vector{} + x; }

// exp(x) for x <= 0 to about 2e-7 relative: 2^n times a polynomial on [-ln2/2, ln2/2].
inline Vector exponential(Vector x) {
  const Vector lowest = broadcast(-87.0f);
  x = x < lowest ? lowest : x;  // keeps NaN
  const Vector magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
  const Vector shifted = x * 1.44269504f + magic;
  const Vector n = shifted - magic;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector p = broadcast(1.0f / 720);
  for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
  const Integers exponent = __builtin_convertvector(n, Integers) + 127;
  Integers bits = exponent << 23;
  Vector power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline Vector tangent(Vector x) {  // hyperbolic tangent, to about 1e-7 absolute
  const Vector size = x < 0 ? -x : x;
  const Vector e = exponential(size * -2.0f);
  const Vector t = (1.0f - e) / (1.0f + e);
  return x < 0 ? -t : t;
}

#if TANDEM_LANES == 16
inline float sum_of(Vector v) { return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v)); }
inline float greatest_of(Vector v) { return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v)); }
#else
inline float sum_of(Vector v) {
  float lanes[TANDEM_LANES];
  store(lanes, v);
  for (int width = TANDEM_LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float greatest_of(Vector v) {
  float greatest = v[0];
  for (int i = 1; i < TANDEM_LANES; ++i) greatest = v[i] > greatest ? v[i] : greatest;
  return greatest;
}
#endif
