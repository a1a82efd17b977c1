// The attention kernel for one width of registers; each instruction set's file includes it with
// TANDEM_LANES (floats of a register) set, inside a namespace of its own.
//
// Positions are unpacked to fp32 in chunks that stay in the first cache, whatever their type and
// width; then sixteen sums are kept in registers: four positions times four heads for the scores,
// four registers of a value row times four heads for the weighted sums.

using Vector = float __attribute__((vector_size(TANDEM_LANES * 4)));
using Integers = std::int32_t __attribute__((vector_size(TANDEM_LANES * 4)));

inline Vector load(const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

inline Vector broadcast(float x) { return Vector{} + x; }

// exp(x) for x <= 0 to about 2e-7 relative: 2^n times a polynomial on [-ln2/2, ln2/2].
inline Vector exponential(Vector x) {
  const Vector lowest = broadcast(-87.0f);
  x = x > lowest ? x : lowest;
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

void unpack(const void* from, ValueType type, std::int64_t dim, std::int64_t begin,
            std::int64_t count, float* to) {
  const std::int64_t width = attention_padded(dim);
  for (std::int64_t p = 0; p < count; ++p, to += width) {
    load_values(value_at(from, type, (begin + p) * dim), type, dim, to);
    for (std::int64_t d = dim; d < width; ++d) to[d] = 0.0f;
  }
}

template <int Heads>
void scores_of(const float* keys, std::int64_t width, std::int64_t count, const float* query,
               float* scores) {
  for (std::int64_t p = 0; p < count; p += 4) {
    Vector sums[4][Heads] = {};
    const float* at = keys + p * width;  // chunks are whole: rows beyond `count` are stale, unused
    for (std::int64_t d = 0; d < width; d += TANDEM_LANES) {
      Vector k[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) k[i] = load(at + i * width + d);
#pragma GCC unroll 4
      for (int h = 0; h < Heads; ++h) {
        const Vector q = load(query + h * width + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[i][h] += k[i] * q;
      }
    }
    for (int h = 0; h < Heads; ++h)
      for (int i = 0; i < 4; ++i) scores[h * kAttentionChunk + p + i] = sum_of(sums[i][h]);
  }
}

template <int Heads>
void add_values(const float* values, std::int64_t width, std::int64_t count, const float* weights,
                float* weighted) {
  constexpr int kRegisters = 4;
  for (std::int64_t d = 0; d < width; d += kRegisters * TANDEM_LANES) {
    const std::int64_t left = (width - d) / TANDEM_LANES;
    const int n = left < kRegisters ? static_cast<int>(left) : kRegisters;
    Vector sums[kRegisters][Heads];
    for (int h = 0; h < Heads; ++h)
      for (int i = 0; i < n; ++i) sums[i][h] = load(weighted + h * width + d + i * TANDEM_LANES);
    if (n == kRegisters) {
      for (std::int64_t p = 0; p < count; ++p) {
        const float* row = values + p * width + d;
#pragma GCC unroll 4
        for (int i = 0; i < kRegisters; ++i) {
          const Vector v = load(row + i * TANDEM_LANES);
#pragma GCC unroll 4
          for (int h = 0; h < Heads; ++h) sums[i][h] += v * weights[h * kAttentionChunk + p];
        }
      }
    } else {
      for (std::int64_t p = 0; p < count; ++p)
        for (int i = 0; i < n; ++i)
          for (int h = 0; h < Heads; ++h)
            sums[i][h] += load(values + p * width + d + i * TANDEM_LANES) *
                          weights[h * kAttentionChunk + p];
    }
    for (int h = 0; h < Heads; ++h)
      for (int i = 0; i < n; ++i) store(weighted + h * width + d + i * TANDEM_LANES, sums[i][h]);
  }
}

// Turns the scores of a chunk into weights, and scales what has been summed with a smaller greatest
// score. Scores behind `count` become weights of 0.
inline void soften(float* scores, std::int64_t count, float scale, float softcap, float& greatest,
                   float& sum, float* weighted, std::int64_t width) {
  for (std::int64_t p = count; p < kAttentionChunk; ++p) scores[p] = 0.0f;
  Vector peaks = broadcast(greatest);
  for (std::int64_t p = 0; p < kAttentionChunk; p += TANDEM_LANES)
    store(scores + p, load(scores + p) * scale);
  if (softcap > 0)
    for (std::int64_t p = 0; p < count; ++p) scores[p] = softcap * std::tanh(scores[p] / softcap);
  for (std::int64_t p = count; p < kAttentionChunk; ++p) scores[p] = -1e30f;
  for (std::int64_t p = 0; p < kAttentionChunk; p += TANDEM_LANES) {
    const Vector score = load(scores + p);
    peaks = score > peaks ? score : peaks;
  }
  const float peak = greatest_of(peaks);
  if (peak > greatest) {
    const float shrink = std::exp(greatest - peak);
    for (std::int64_t d = 0; d < width; d += TANDEM_LANES)
      store(weighted + d, load(weighted + d) * shrink);
    sum *= shrink;
    greatest = peak;
  }
  Vector total = {};
  for (std::int64_t p = 0; p < kAttentionChunk; p += TANDEM_LANES) {
    const Vector weight = exponential(load(scores + p) - peak);
    store(scores + p, weight);
    total += weight;
  }
  sum += sum_of(total);  // with e^-87 for each place behind `count`: nothing
  for (std::int64_t p = count; p < kAttentionChunk; ++p) scores[p] = 0.0f;
}

void attend(const void* keys, std::int64_t key_dim, const void* values, std::int64_t value_dim,
            ValueType type, std::int64_t begin, std::int64_t end, const float* query,
            std::int64_t heads, float scale, float softcap, PartialAttention partial,
            float* scratch) {
  const std::int64_t key_width = attention_padded(key_dim);
  const std::int64_t value_width = attention_padded(value_dim);
  float* key_rows = scratch;
  float* value_rows = key_rows + kAttentionChunk * key_width;
  float* scores = value_rows + kAttentionChunk * value_width;  // (heads padded by 3, chunk)
  for (std::int64_t at = begin; at < end; at += kAttentionChunk) {
    const std::int64_t count = end - at < kAttentionChunk ? end - at : kAttentionChunk;
    unpack(keys, type, key_dim, at, count, key_rows);
    std::int64_t h = 0;
    for (; h + 4 <= heads; h += 4)
      scores_of<4>(key_rows, key_width, count, query + h * key_width, scores + h * kAttentionChunk);
    for (; h < heads; ++h)
      scores_of<1>(key_rows, key_width, count, query + h * key_width, scores + h * kAttentionChunk);
    for (h = 0; h < heads; ++h)
      soften(scores + h * kAttentionChunk, count, scale, softcap, partial.greatest[h], partial.sum[h],
             partial.weighted + h * value_width, value_width);
    unpack(values, type, value_dim, at, count, value_rows);
    for (h = 0; h + 4 <= heads; h += 4)
      add_values<4>(value_rows, value_width, count, scores + h * kAttentionChunk,
                    partial.weighted + h * value_width);
    for (; h < heads; ++h)
      add_values<1>(value_rows, value_width, count, scores + h * kAttentionChunk,
                    partial.weighted + h * value_width);
  }
}
