// Turns the products of a row with a chunk's keys into weights of its values. Included by
// attention_kernel.inl.

struct Running {  // of one row
  float* greatest;
  float* sum;
  float* weighted;
};

// Writes `value` at the positions of a chunk that a row does not see.
inline void hide(float* scores, std::uint64_t seen, float value) {
  const std::int64_t first = std::countr_zero(seen), last = kKvChunk - std::countl_zero(seen);
  std::fill_n(scores, first, value);
  std::fill_n(scores + last, kKvChunk - last, value);
  if (std::popcount(seen) == last - first) return;
  for (std::int64_t p = first; p < last; ++p) scores[p] = seen >> p & 1 ? scores[p] : value;
}

// Turns a row's products with the keys of a chunk into scores; the chunk begins at position `at`.
inline void scale_scores(float* scores, const QueryTile& tile, std::int64_t row, std::int64_t at) {
  const DistanceBias* bias = tile.bias;
  const std::int64_t dim = bias ? bias->dim : 0;
  const std::int64_t first = dim > 0 ? bias->first(tile.seen[row].end - 1, at) : 0;
  // Otherwise all positions are beyond the extent.
  const std::int64_t num_biased = first > 0 ? dim : 0;
  for (std::int64_t p = 0; p < kKvChunk; p += TANDEM_LANES) {
    Vector score = load(scores + p) * tile.scale;
    for (std::int64_t j = 0; j < num_biased; ++j)
      score += load(bias->profiles + j * bias->width() + first + p) * tile.bias_states[row * dim + j];
    if (tile.softcap > 0) score = tangent(score * (1.0f / tile.softcap)) * tile.softcap;
    store(scores + p, score);
  }
}

// Turns a row's scores into weights and rescales earlier sums if the greatest score grows. The row
// sees the positions whose bit is set.
inline void soften(float* scores, std::uint64_t seen, const Running& row, std::int64_t width) {
  if (seen == 0) {
    std::fill_n(scores, kKvChunk, 0.0f);
    return;
  }
  hide(scores, seen, -1e30f);
  Vector peaks = broadcast(*row.greatest);
  for (std::int64_t p = 0; p < kKvChunk; p += TANDEM_LANES) {
    const Vector score = load(scores + p);
    peaks = score > peaks ? score : peaks;
  }
  const float peak = greatest_of(peaks);
  if (peak > *row.greatest) {
    const float shrink = std::exp(*row.greatest - peak);
    for (std::int64_t d = 0; d < width; d += TANDEM_LANES)
      store(row.weighted + d, load(row.weighted + d) * shrink);
    *row.sum *= shrink;
    *row.greatest = peak;
  }
  Vector total = {};
  for (std::int64_t p = 0; p < kKvChunk; p += TANDEM_LANES) {
    const Vector weight = exponential(load(scores + p) - peak);
    store(scores + p, weight);
    total += weight;
  }
  *row.sum += sum_of(total);  // hidden positions add e^-87 each, which is nothing
  hide(scores, seen, 0.0f);
}
