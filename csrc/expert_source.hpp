// Where a layer's experts come from if they do not all lie in memory: asked for at once, handed out
// as they come.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace tandem {

// What a call uses of a layer.
struct ExpertUse {
  std::int32_t layer;
  std::span<const std::int32_t> experts;
  std::span<const std::int32_t> tokens;  // of each of them
  std::span<const std::int32_t> last;    // experts of the call's last token
  std::int64_t num_tokens;
  double patience = 0.0;  // seconds that `next` waits; 0: as long as the source does for any use
};

// Says in one sentence what could not be read, and what to do.
class DiskError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A use with a patience of its own has had to wait for longer; the read goes on.
class DiskSlow : public DiskError {
 public:
  using DiskError::DiskError;
};

// An expert that stays where it is; without an address: there was no room for it.
struct ExpertHold {
  std::int32_t layer = -1, expert = -1;
  const std::uint8_t* address = nullptr;
  bool is_asked = false;  // for its read
};

// One use at a time. Between `begin` and `end` an expert that was handed out stays where it is until
// `next` is called again.
class ExpertSource {
 public:
  struct Arrived {
    std::int64_t place;  // among the use's experts
    const std::uint8_t* address;
    bool stays;  // where it is, until `end`
  };

  virtual ~ExpertSource() = default;
  virtual void begin(const ExpertUse& use) = 0;
  // As `next`, but waits for nothing: none where none has come.
  virtual std::span<const Arrived> there() = 0;
  // Experts that have come and were not handed out, at first those in memory; waits for one. None
  // when all have been. Throws DiskError, or DiskSlow.
  virtual std::span<const Arrived> next() = 0;
  virtual void end() noexcept = 0;

  // From any thread, beside a use: see HeldExpert.
  virtual ExpertHold hold(std::int32_t layer, std::int32_t expert, bool waits) = 0;
  virtual bool has_come(const ExpertHold& hold) = 0;
  virtual void wait_for(ExpertHold& hold) = 0;
  virtual void let_go(const ExpertHold& hold) noexcept = 0;

  // Room for an expert that leaves a device, if the eviction would keep it: none of its bytes have come.
  // `keep` takes it once they have; what is only let go of is forgotten.
  virtual ExpertHold take_back(std::int32_t layer, std::int32_t expert) = 0;
  virtual void keep(const ExpertHold& hold) noexcept = 0;
};

// An expert that stays where it is until this is gone, for copies to a device. Its read has begun.
class HeldExpert {
 public:
  HeldExpert() = default;
  // With `waits` it waits until there is room, for a thread that lets go of what it holds without
  // this one; else it holds nothing where there is none.
  HeldExpert(ExpertSource& source, std::int32_t layer, std::int32_t expert, bool waits)
      : HeldExpert(source, source.hold(layer, expert, waits)) {}
  HeldExpert(ExpertSource& source, const ExpertHold& hold) : source_(&source), hold_(hold) {}
  HeldExpert(HeldExpert&& other) noexcept
      : source_(other.source_), hold_(std::exchange(other.hold_, {})) {}
  HeldExpert& operator=(HeldExpert&& other) noexcept {
    std::swap(source_, other.source_);
    std::swap(hold_, other.hold_);
    return *this;
  }
  ~HeldExpert() { let_go(); }

  explicit operator bool() const { return hold_.address != nullptr; }
  const std::uint8_t* address() const { return hold_.address; }
  // Of what is taken back: where its bytes go.
  std::uint8_t* room() const { return const_cast<std::uint8_t*>(hold_.address); }
  bool has_come() const { return source_->has_come(hold_); }
  void wait() { source_->wait_for(hold_); }  // for its bytes; throws DiskError
  void keep() noexcept {  // of what is taken back: its bytes have come
    source_->keep(hold_);
    let_go();
  }
  void let_go() noexcept {
    if (hold_.address != nullptr) source_->let_go(hold_);
    hold_ = {};
  }

 private:
  ExpertSource* source_ = nullptr;
  ExpertHold hold_;
};

}  // namespace tandem
