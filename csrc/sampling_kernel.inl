// The passes of sampling for one width of registers. Each instruction set's file includes it after
// vectors.inl, inside its own namespace.

constexpr int kBlockRegisters = kSamplingBlock / TANDEM_LANES;
constexpr int kSums = 4;  // independent sums, which hide the latency of additions
constexpr float kLeastExponent = -87.0f;  // for less, e^x is not a normal number

inline Vector greater_of(Vector a, Vector b) { return a > b ? a : b; }

float greatest_value(const float* values, std::int64_t count) {
  Vector greatest[kSums];
  for (Vector& v : greatest) v = broadcast(-std::numeric_limits<float>::infinity());
  for (std::int64_t i = 0; i < count; i += kSums * TANDEM_LANES)
    for (int j = 0; j < kSums; ++j)
      greatest[j] = greater_of(load(values + i + j * TANDEM_LANES), greatest[j]);
  return greatest_of(greater_of(greater_of(greatest[0], greatest[1]),
                                greater_of(greatest[2], greatest[3])));
}

std::int64_t find_value(const float* values, std::int64_t count, float value) {
  for (std::int64_t i = 0; i < count; i += kSamplingBlock) {
    Integers found = {};
    for (int j = 0; j < kBlockRegisters; ++j)
      found |= load(values + i + j * TANDEM_LANES) == broadcast(value);
    Vector any;
    found &= 1;
    any = __builtin_convertvector(found, Vector);
    if (sum_of(any) == 0) continue;
    while (values[i] != value) ++i;
    return i;
  }
  return count;
}

Above sum_above(const float* values, std::int64_t count, float pivot) {
  const Vector limit = broadcast(pivot);
  Integers counts[kSums] = {};
  double total = 0;
  for (std::int64_t block = 0; block < count; block += kSamplingBlock) {
    Vector sums[kSums] = {};
    for (std::int64_t i = block; i < block + kSamplingBlock; i += kSums * TANDEM_LANES)
#pragma GCC unroll 4
      for (int j = 0; j < kSums; ++j) {
        const Vector v = load(values + i + j * TANDEM_LANES);
        const Integers is_above = v > limit;
        counts[j] -= is_above;
        sums[j] += is_above ? v : Vector{};
      }
    total += sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  const Integers all = (counts[0] + counts[1]) + (counts[2] + counts[3]);
  std::int64_t number = 0;
  for (int lane = 0; lane < TANDEM_LANES; ++lane) number += all[lane];
  return {number, total};
}

std::int64_t collect_values(const float* values, std::int64_t count, float low, float high,
                            float* to) {
  std::int64_t number = 0;
#if TANDEM_LANES == 16
  for (std::int64_t i = 0; i < count; i += 16) {
    const __m512 v = _mm512_loadu_ps(values + i);
    const __mmask16 is_within = _mm512_cmp_ps_mask(v, _mm512_set1_ps(low), _CMP_GT_OQ) &
                                _mm512_cmp_ps_mask(v, _mm512_set1_ps(high), _CMP_LE_OQ);
    // Compresses in a register, because a compressing store takes Zen 4 a hundred cycles.
    _mm512_storeu_ps(to + number, _mm512_maskz_compress_ps(is_within, v));
    number += __builtin_popcount(is_within);
  }
#else
  for (std::int64_t i = 0; i < count; ++i) {
    const float v = values[i];
    to[number] = v;
    number += (v > low) & (v <= high);
  }
#endif
  return number;
}

void weigh_scores(const float* scores, std::int64_t count, float least, float greatest,
                  float factor, float* weights, float* sums) {
  for (std::int64_t block = 0; block < count; block += kSamplingBlock) {
    Vector total[2] = {};
    for (std::int64_t i = block; i < block + kSamplingBlock; i += 2 * TANDEM_LANES)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const Vector score = load(scores + i + j * TANDEM_LANES);
        const Vector x = (score - greatest) * factor;
        const Integers is_kept = (score >= least) & (x >= kLeastExponent);
        const Vector weight = is_kept ? exponential(x) : Vector{};
        store(weights + i + j * TANDEM_LANES, weight);
        total[j] += weight;
      }
    sums[block / kSamplingBlock] = sum_of(total[0] + total[1]);
  }
}

void add_up_weights(const float* weights, std::int64_t count, float least, float* sums) {
  for (std::int64_t block = 0; block < count; block += kSamplingBlock) {
    Vector total[kSums] = {};
    for (std::int64_t i = block; i < block + kSamplingBlock; i += kSums * TANDEM_LANES)
#pragma GCC unroll 4
      for (int j = 0; j < kSums; ++j) {
        const Vector weight = load(weights + i + j * TANDEM_LANES);
        total[j] += weight >= least ? weight : Vector{};
      }
    sums[block / kSamplingBlock] = sum_of((total[0] + total[1]) + (total[2] + total[3]));
  }
}

constexpr SamplingKernel kSamplingKernel{greatest_value, find_value,   sum_above,
                                         collect_values, weigh_scores, add_up_weights};
