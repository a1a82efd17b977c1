// Where memory over a disk has a layer's experts, as Python passes it: one byte each.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <vector>

#include "decider/reads.hpp"

namespace tandem {

// Empty: memory has all experts. Throws std::invalid_argument.
inline std::vector<Place> places_of(const nanobind::bytes& places, std::size_t num_experts) {
  if (places.size() != 0 && places.size() != num_experts)
    throw std::invalid_argument("expected no places, or one for each expert");
  std::vector<Place> found;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto place = static_cast<std::uint8_t>(places.c_str()[i]);
    if (place > static_cast<std::uint8_t>(Place::kOnDisk))
      throw std::invalid_argument("expected places from 0 to 2");
    found.push_back(static_cast<Place>(place));
  }
  return found;
}

}  // namespace tandem
