// A source of a layer's experts if not all of them are in memory: they are requested together and
// handed out as they arrive.
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
  std::span<const std::int32_t> tokens;  // of each expert
  std::span<const std::int32_t> last;  // experts of the call's last token
  std::int64_t num_tokens;
  double patience = 0.0;  // seconds that `next` waits; 0: the source's own limit
};

// The message says in one sentence what could not be read, and what to do.
class DiskError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A use with its own patience would have to wait longer; the read goes on.
class DiskSlow : public DiskError {
 public:
  using DiskError::DiskError;
};

// An expert that is held in place; without an address: there was no room for it.
struct ExpertHold {
  std::int32_t layer = -1, expert = -1;
  const std::uint8_t* address = nullptr;
  bool is_demanded = false;
};

// One use at a time. Between `begin` and `end`, an expert that was handed out stays in place until
// `next` is called again.
class DenseEngine;

// The inputs of a layer's experts, which most models' routers read too.
struct RouterInputs {
  std::int32_t layer;
  const float* values;  // (num_tokens, hidden_size)
  std::int64_t hidden_size, num_tokens, top_k;
};

class ExpertSource {
 public:
  struct Arrived {
    std::int64_t place;  // position in the use
    const std::uint8_t* address;
    bool stays;  // stays in place until `end`
  };

  virtual ~ExpertSource() = default;
  virtual void begin(const ExpertUse& use) = 0;
  // Like `next`, but never waits; empty if no expert has arrived.
  virtual std::span<const Arrived> there() = 0;
  // Returns experts that have arrived and were not handed out, first those in memory; waits for at
  // least one. Empty when all have been handed out. Throws DiskError or DiskSlow.
  virtual std::span<const Arrived> next() = 0;
  virtual void end() noexcept = 0;

  // Called after `begin`: predicts the next layer's experts, with the idle engine.
  virtual void look_ahead(DenseEngine& engine, const RouterInputs& inputs) = 0;

  // From any thread, independent of a use; see HeldExpert.
  virtual ExpertHold hold(std::int32_t layer, std::int32_t expert, bool waits) = 0;
  virtual bool has_come(const ExpertHold& hold) = 0;
  virtual void wait_for(ExpertHold& hold) = 0;
  virtual void let_go(const ExpertHold& hold) noexcept = 0;

  // Returns room for an expert that leaves a device, if the eviction would keep it. Its bytes come
  // later; `keep` then takes it. If it is only released, it is forgotten.
  virtual ExpertHold take_back(std::int32_t layer, std::int32_t expert) = 0;
  virtual void keep(const ExpertHold& hold) noexcept = 0;
};

// Holds an expert in place for copies to a device, until destroyed. Its read has begun.
class HeldExpert {
 public:
  HeldExpert() = default;
  // With `waits`, waits until there is room. Only for threads whose other holds will be released
  // without this one. Otherwise holds nothing if there is no room.
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
  // The memory for an expert that is taken back.
  std::uint8_t* room() const { return const_cast<std::uint8_t*>(hold_.address); }
  bool has_come() const { return source_->has_come(hold_); }
  void wait() { source_->wait_for(hold_); }  // for its bytes; throws DiskError
  void keep() noexcept {  // the bytes of an expert that is taken back have arrived
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
