"""The emulated device for a loaded model, on a virtual clock or on the wall's."""

from functools import partial

from tandem.devices.emulated import EmulatedDevice
from tandem.experts.cache.clock import Clock, WallClock
from tandem.experts.cache.copy_engine import VirtualCopyEngine
from tandem.experts.cache.copy_thread import CopyThread
from tandem.experts.cache.expert_cache import ExpertCache, Machine
from tandem.experts.cache.sizing import parse_gpu_memory
from tandem.experts.cache.slots import Slots
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.twin_steps import TwinSteps
from tandem.experts.measuring.profiler import with_emulated_gpu
from tandem.experts.store.host_memory import available_bytes
from tandem.experts.store.host_store import HostStore
from tandem.hardware.profiles import load_profile
from tandem.hf.machine.parts import DeviceParts, ObservedModel
from tandem.hf.machine.profile import measured_profile
from tandem.kernels.dense import CpuThreads
from tandem.policy.plan import Geometry
from tandem.sim.timeline import Timeline


def device_parts(observed: ObservedModel) -> DeviceParts:
    """Return the device, with costs by the profile that the options name or as measured here."""
    options = observed.options
    if options.profile is not None:
        profile = load_profile(options.profile)
    else:
        profile = with_emulated_gpu(measured_profile(observed), options.emulated_speed)
    if options.clock == "real":
        return _on_the_wall_clock(observed, observed.machine(profile))
    machine, kernels = observed.machine(profile), observed.cpu_kernels()
    device = EmulatedDevice(available_bytes(), kernels)
    clock = Timeline(machine.profile, machine.shape)
    share = parse_gpu_memory(options.gpu_memory)
    return DeviceParts(device, clock, kernels, VirtualCopyEngine, machine, share)


def _on_the_wall_clock(observed: ObservedModel, machine: Machine) -> DeviceParts:
    """Return a device and a link with threads of their own, which share this machine's cores."""
    clock, rate = WallClock(), observed.link_bytes_per_second
    own = CpuThreads(num_threads=observed.threads.num_threads, isa=observed.threads.isa)
    device_kernels = ExpertKernels(own, on_busy=clock.add_gpu)
    device = EmulatedDevice(available_bytes(), device_kernels, has_thread=True)

    def make_engine(store: HostStore, slots: Slots, geometry: Geometry, _: Clock) -> CopyThread:
        return CopyThread(store, slots, geometry, clock, bytes_per_second=rate)

    share = parse_gpu_memory(observed.options.gpu_memory)
    kernels = observed.cpu_kernels(clock.add_cpu)
    return DeviceParts(
        device,
        clock,
        kernels,
        make_engine,
        machine,
        share,
        captured=partial(_captured_steps, observed),
    )


def _captured_steps(observed: ObservedModel, cache: ExpertCache) -> TwinSteps | None:
    """Return what computes decode steps; None where the kernels or the policy need plans."""
    layers = observed.native_layers(cache)
    if layers is None:
        return None
    rate = observed.link_bytes_per_second
    return TwinSteps(cache, layers, observed.threads, observed.call.dtype, bytes_per_second=rate)
