// Rounding to e2m1 numbers times powers of two; included in quantize_kernel.inl.

// The magnitude as an e2m1 code 0..7 in units of a power of two: the lowest of three lines, through
// the codes at steps of 0.5, 1 and 2. Ties go to even codes.
inline Vector e2m1_code(Vector scaled) {
  const Vector code = smaller(smaller(scaled + 2.0f, scaled * 2.0f), scaled * 0.5f + 4.0f);
  return rounded(smaller(code, broadcast(7.0f)));
}

inline Vector e2m1_magnitude(Vector code) {
  return larger(larger(code * 0.5f, code - 2.0f), code * 2.0f - 8.0f);
}

inline Vector power_of_two(Integers exponent) {  // -126..127
  return from_bits((exponent + 127) << 23);
}

Vector e2m1_error(const Group& group, Integers exponent) {
  const Vector to_unit = power_of_two(-exponent);
  Vector error{};
  for (std::int64_t c = 0; c < group.size; ++c) {
    const Vector scaled = size_of(group.tile[c]) * to_unit;
    const Vector loss = e2m1_magnitude(e2m1_code(scaled)) - scaled;
    error += group.weighed(loss * loss, c);
  }
  return error;
}

constexpr std::int32_t kE8m0Bias = 127, kLargestE8m0 = 252;

Integers fit_exponent(const QuantizeCall& call, const Group& group) {
  const Vector peak = larger(group.high, -group.low);
  Integers exponent = (bits_of(peak) >> 23) - 129;  // puts the peak in 4..8 times the unit
  exponent = exponent < -kE8m0Bias ? Integers{} - kE8m0Bias : exponent;
  exponent = peak == 0.0f ? Integers{} - 3 : exponent;
  if (!call.has_search) return exponent;
  Integers below = exponent - 1;
  below = below < -kE8m0Bias ? Integers{} - kE8m0Bias : below;
  // Errors are in units of 4^exponent.
  const Vector near = e2m1_error(group, exponent), far = 4.0f * e2m1_error(group, exponent + 1);
  const Vector cut = 0.25f * e2m1_error(group, below);  // cuts the peak, if it matters little
  Integers best = far < near ? exponent + 1 : exponent;
  best = cut < smaller(far, near) ? below : best;
  const Integers largest = Integers{} + (kLargestE8m0 - kE8m0Bias);
  return best > largest ? largest : best;
}
