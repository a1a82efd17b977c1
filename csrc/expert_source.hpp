// Where a layer's experts come from if they do not all lie in memory: asked for at once, handed out
// as they come.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

namespace tandem {

// What a call uses of a layer.
struct ExpertUse {
  std::int32_t layer;
  std::span<const std::int32_t> experts;
  std::span<const std::int32_t> tokens;  // of each of them
  std::span<const std::int32_t> last;    // experts of the call's last token
  std::int64_t num_tokens;
};

// Says in one sentence what could not be read, and what to do.
class DiskError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One use at a time. Between `begin` and `end` an expert that was handed out stays where it is until
// `next` is called again.
class ExpertSource {
 public:
  struct Arrived {
    std::int64_t place;  // among the use's experts
    const std::uint8_t* address;
  };

  virtual ~ExpertSource() = default;
  virtual void begin(const ExpertUse& use) = 0;
  // Experts that have come and were not handed out, at first those in memory; waits for one. None
  // when all have been. Throws DiskError.
  virtual std::span<const Arrived> next() = 0;
  virtual void end() noexcept = 0;
};

}  // namespace tandem
