"""The emulated device for a loaded model, on a virtual clock."""

from functools import partial

from tandem.devices.emulated import EmulatedDevice
from tandem.experts.cache.copy_engine import VirtualCopyEngine
from tandem.experts.cache.sizing import parse_gpu_memory
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.measuring.profiler import with_emulated_gpu
from tandem.experts.store import host_memory
from tandem.hardware.profiles import load_profile
from tandem.hf.machine.parts import DeviceParts, ObservedModel
from tandem.hf.machine.profile import measured_profile
from tandem.policy.cost import HardwareProfile
from tandem.sim.timeline import Timeline


def device_parts(observed: ObservedModel) -> DeviceParts:
    """Return the parts of an emulated device, whose costs are those of `emulated_profile`."""
    machine, kernels = observed.machine(emulated_profile(observed)), observed.cpu_kernels()
    # Called through its module because this module is imported late: a test's patch of it must not
    # stay here.
    device = EmulatedDevice(host_memory.available_bytes(), kernels)
    clock = Timeline(machine.profile, machine.shape)
    share = parse_gpu_memory(observed.options.gpu_memory)
    make_executor = partial(HybridExecutor, in_graph=machine.path.in_graph)
    return DeviceParts(
        device, clock, kernels, VirtualCopyEngine, machine, share, make_executor=make_executor
    )


def emulated_profile(observed: ObservedModel) -> HardwareProfile:
    """Return the profile that the options name; by default this machine's plus an emulated GPU."""
    options = observed.options
    if options.profile is not None:
        return load_profile(options.profile)
    return with_emulated_gpu(measured_profile(observed), options.emulated_speed)
