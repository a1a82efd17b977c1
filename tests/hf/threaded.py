"""The parts of device `threaded` for a loaded model; `tests.threaded` registers its name.

Device and link have their own threads on this machine's cores, and decode steps go through the
coordinator as on a GPU.
"""

from functools import partial

from tandem.experts.cache.clock import Clock, WallClock
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.sizing import parse_gpu_memory
from tandem.experts.cache.slots import Slots
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.store import host_memory
from tandem.experts.store.host_store import HostStore
from tandem.hf.machine.parts import DeviceParts, ObservedModel
from tandem.kernels.dense import CpuThreads
from tandem.machines.emulated import emulated_profile
from tandem.policy.plan import Geometry
from tests.experts.copy_thread import CopyThread
from tests.experts.threaded_device import ThreadedDevice
from tests.experts.twin_steps import TwinExecutor, TwinSteps


def device_parts(observed: ObservedModel) -> DeviceParts:
    machine = observed.machine(emulated_profile(observed))  # before there is a thread
    clock, rate = WallClock(), observed.link_bytes_per_second
    own = CpuThreads(num_threads=observed.threads.num_threads, isa=observed.threads.isa)
    device_kernels = ExpertKernels(own, on_busy=clock.add_gpu)
    device = ThreadedDevice(host_memory.available_bytes(), device_kernels, has_thread=True)

    def make_engine(store: HostStore, slots: Slots, geometry: Geometry, _: Clock) -> CopyThread:
        return CopyThread(store, slots, geometry, clock, bytes_per_second=rate)

    return DeviceParts(
        device,
        clock,
        observed.cpu_kernels(clock.add_cpu),
        make_engine,
        machine,
        parse_gpu_memory(observed.options.gpu_memory),
        captured=partial(_captured_steps, observed),
        make_executor=TwinExecutor,
    )


def _captured_steps(observed: ObservedModel, cache: ExpertCache) -> TwinSteps | None:
    """Return what computes decode steps; None if the kernels or the policy need plans."""
    layers = observed.native_layers(cache)
    if layers is None:
        return None
    rate = observed.link_bytes_per_second
    return TwinSteps(cache, layers, observed.threads, observed.call.dtype, bytes_per_second=rate)
