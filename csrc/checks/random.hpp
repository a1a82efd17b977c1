// Random numbers of the check programs: the same in every run.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace tandem::checks {

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}

  std::int64_t between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }

  float normal() { return std::normal_distribution<float>()(engine_); }

  std::vector<float> normals(std::int64_t count, float size = 1.0f) {
    std::vector<float> values(count);
    for (float& value : values) value = size * normal();
    return values;
  }

 private:
  std::mt19937 engine_;
};

}  // namespace tandem::checks
