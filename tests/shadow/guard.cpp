// A guard for a CUDA device that there is none of: torch of a CPU build then lets tensors say
// `cuda:0` where it would stop at the first index. Built and loaded by tests/shadow/device.py.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kKind = c10::DeviceType::CUDA;
const c10::Device kOnly(kKind, 0);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKind; }
  c10::Device exchangeDevice(c10::Device) const override { return kOnly; }
  c10::Device getDevice() const override { return kOnly; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, kOnly);
  }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(kOnly); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

const Guard guard;

}  // namespace

extern "C" void shadow_guard(int is_on) {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kKind)].store(is_on ? &guard : nullptr);
}
