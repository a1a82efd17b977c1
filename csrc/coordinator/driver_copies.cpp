#include "coordinator/driver_copies.hpp"

#include <dlfcn.h>

#include <stdexcept>

namespace tandem {
namespace {

constexpr int kVersion = 12000;  // the CUDA version whose functions are requested
constexpr unsigned kBesideAll = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned kSleepsWithoutClock = 3;  // CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING
constexpr unsigned kBehindAll = 0;  // CU_STREAM_WRITE_VALUE_DEFAULT
constexpr int kLowestPriority = 0;

}  // namespace

Driver::Driver(const std::string& library) : library_(dlopen(library.c_str(), RTLD_NOW)) {
  if (library_ == nullptr) throw std::runtime_error("cannot load " + library);
  get_address_ = reinterpret_cast<decltype(get_address_)>(dlsym(library_, "cuGetProcAddress_v2"));
  if (get_address_ == nullptr)
    throw std::runtime_error("the driver is older than CUDA 12; update it");
  find(error_string_, "cuGetErrorString", false);
  find(context_set_current, "cuCtxSetCurrent");
  find(stream_create, "cuStreamCreateWithPriority");
  find(stream_destroy, "cuStreamDestroy");
  find(stream_synchronize, "cuStreamSynchronize");
  find(event_create, "cuEventCreate");
  find(event_destroy, "cuEventDestroy");
  find(event_record, "cuEventRecord");
  find(event_synchronize, "cuEventSynchronize");
  find(copy_to_device, "cuMemcpyHtoDAsync");
  find(copy_to_host, "cuMemcpyDtoHAsync");
  find(write_value, "cuStreamWriteValue64", false);
  int (*get_current)(Handle*) = nullptr;
  find(get_current, "cuCtxGetCurrent");
  require(get_current(&context_), "cuCtxGetCurrent");
  if (context_ == nullptr) throw std::runtime_error("no GPU is current in this thread");
}

template <typename Function>
void Driver::find(Function& function, const char* name, bool is_needed) {
  void* found = nullptr;
  if (get_address_(name, &found, kVersion, 0, nullptr) != 0) found = nullptr;
  if (found == nullptr && is_needed)
    throw std::runtime_error(std::string("the driver has no ") + name);
  function = reinterpret_cast<Function>(found);
}

void Driver::require(int code, const char* what) const {
  if (code == 0) return;
  const char* text = nullptr;
  if (error_string_ == nullptr || error_string_(code, &text) != 0 || text == nullptr)
    text = "an unknown error";
  throw std::runtime_error(std::string(what) + " returned " + std::to_string(code) + ", " + text);
}

DriverCopyEngine::DriverCopyEngine(std::shared_ptr<Driver> driver, std::uint64_t table)
    : driver_(std::move(driver)), table_(table), can_write_(driver_->write_value != nullptr) {}

DriverCopyEngine::~DriverCopyEngine() {  // errors of the driver at a program's end mean nothing
  if (stream_ == nullptr) return;
  driver_->stream_synchronize(stream_);
  for (const Driver::Handle event : queued_) driver_->event_destroy(event);
  for (const Driver::Handle event : spare_) driver_->event_destroy(event);
  driver_->stream_destroy(stream_);
}

// Called on the copying thread, because a context is current per thread.
void DriverCopyEngine::enter() {
  if (has_entered_) return;
  driver_->require(driver_->context_set_current(driver_->context()), "cuCtxSetCurrent");
  if (stream_ == nullptr)
    driver_->require(driver_->stream_create(&stream_, kBesideAll, kLowestPriority),
                     "cuStreamCreateWithPriority");
  has_entered_ = true;
}

void DriverCopyEngine::copy(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) {
  enter();
  driver_->require(driver_->copy_to_device(reinterpret_cast<Driver::Address>(to), from,
                                           static_cast<std::size_t>(bytes), stream_),
                   "cuMemcpyHtoDAsync");
  note_queued();
}

void DriverCopyEngine::copy_back(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) {
  enter();
  driver_->require(driver_->copy_to_host(to, reinterpret_cast<Driver::Address>(from),
                                         static_cast<std::size_t>(bytes), stream_),
                   "cuMemcpyDtoHAsync");
  note_queued();
}

// If the driver refuses, entries become visible at the next step: the host's table is copied to the
// device before each step.
void DriverCopyEngine::publish(std::int64_t key, std::int64_t address) {
  enter();
  if (!can_write_) return;
  can_write_ = driver_->write_value(stream_, table_ + 8 * static_cast<std::uint64_t>(key),
                                    static_cast<std::uint64_t>(address), kBehindAll) == 0;
  if (can_write_) note_queued();
}

void DriverCopyEngine::note_queued() {
  Driver::Handle event = nullptr;
  if (spare_.empty()) {
    driver_->require(driver_->event_create(&event, kSleepsWithoutClock), "cuEventCreate");
  } else {
    event = spare_.back();
    spare_.pop_back();
  }
  queued_.push_back(event);
  ++num_queued_;
  driver_->require(driver_->event_record(event, stream_), "cuEventRecord");
}

void DriverCopyEngine::wait(std::int64_t most_left) {
  while (static_cast<std::int64_t>(queued_.size()) > most_left) {
    driver_->require(driver_->event_synchronize(queued_.front()), "cuEventSynchronize");
    spare_.push_back(queued_.front());
    queued_.pop_front();
  }
}

}  // namespace tandem
