"""Wires a loaded model to what computes its experts: the one place where the parts meet.

Store, device, clock, planner and kernels know nothing of each other's making; options choose them
here.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from tandem.core.errors import UnsupportedModelError
from tandem.core.units import parse_bandwidth
from tandem.experts.cache.copy_engine import VirtualCopyEngine
from tandem.experts.cache.copy_thread import CopyThread
from tandem.experts.cache.expert_cache import EngineMaker, ExpertCache, Machine
from tandem.experts.cache.heat import Heat
from tandem.experts.cache.sizing import count_slots
from tandem.experts.cache.slots import Slots
from tandem.experts.cache.start import STARTS
from tandem.experts.devices.device import Device
from tandem.experts.devices.emulated import EmulatedDevice
from tandem.experts.execution.clock import Clock, WallClock
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.measuring.profiler import with_emulated_gpu, with_link
from tandem.experts.options import MemoryShare, parse_gpu_memory
from tandem.experts.store.host_memory import available_bytes
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.pinning import pin_store
from tandem.hardware.profiles import load_profile, shape_for
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import pack_dense_layers, share_threads
from tandem.hf.dense_files import take_stored_layers
from tandem.hf.experts import bind_all
from tandem.hf.identity import model_identity
from tandem.hf.lookahead.look_ahead import SOURCES, LookAhead, look_ahead
from tandem.hf.lookahead.warm_up import WARM_UP_TOKENS, ExpertsCall, Observer, forward_tokens
from tandem.hf.machine.cuda import cuda_parts
from tandem.hf.machine.profile import measured_profile
from tandem.hf.runtime import Runtime, require_runtime
from tandem.policy.cost import HardwareProfile
from tandem.policy.plan import Geometry
from tandem.sim.timeline import Timeline


def assemble(model: Any, runtime: Runtime, options: OffloadConfig) -> None:
    """Make a model's experts run as the options say, from now on; raises `TandemError`."""
    runtime.executor.close()
    runtime.choose(options)
    take_stored_layers(model, runtime.threads)
    pack_dense_layers(model, options.dense_dtype, runtime.threads)
    share_threads(model, runtime.threads)
    runtime.look_ahead = None
    cpu = runtime.cpu_executor()
    if options.device == "cpu":
        runtime.use(cpu)
    else:
        runtime.use(_Assembly(model, runtime, cpu).hybrid())


def profile_of(model: Any, *, refresh: bool = False) -> HardwareProfile:
    """Return this machine's profile for a loaded model; measure it if there is none, or again."""
    runtime = require_runtime(model)
    cpu = runtime.cpu_executor()
    with runtime.using(cpu):
        return _Assembly(model, runtime, cpu).measured(refresh=refresh)


class _Lanes(NamedTuple):
    """The device, the link and the CPU, and the clock that they run by."""

    device: Device
    clock: Clock
    kernels: ExpertKernels
    make_engine: EngineMaker
    share: MemoryShare
    reserved_bytes: int = 0


def _end(cache: ExpertCache, heat: Heat) -> None:
    """Keep what was learned and end the threads, when the executor is gone or the program ends."""
    heat.save()
    cache.close()


class _Assembly:
    """Everything that the parts of a hybrid executor are made from."""

    def __init__(
        self,
        model: Any,
        runtime: Runtime,
        cpu: CpuExecutor,
    ) -> None:
        self.model, self.runtime = model, runtime
        self.store, self.bound, self.config = runtime.store, runtime.bound, runtime.options
        config, store = self.config, self.store
        self.call = self._observe(cpu)
        most_experts = max(layer.arrivals.num_experts for layer in store)
        self.geometry = Geometry(len(store), most_experts, self.call.top_k)
        self.kernels = ExpertKernels(num_threads=config.threads, isa=config.isa or "")

    def _observe(self, cpu: CpuExecutor) -> ExpertsCall:
        observer = Observer(cpu)
        bind_all(self.bound, observer)
        try:
            forward_tokens(self.model, WARM_UP_TOKENS)
        except Exception as error:
            name = type(self.model).__name__
            raise UnsupportedModelError(
                f"{name} cannot be run on text alone ({error}), so its experts cannot be observed; "
                "load it with device='cpu'"
            ) from error
        if not observer.calls:
            name = type(self.model).__name__
            raise UnsupportedModelError(
                f"{name} used none of its experts for a text; load it with device='cpu'"
            )
        return observer.calls[0]

    def hybrid(self) -> HybridExecutor:
        """Build the executor, its cache filled; an error leaves nothing pinned or limited."""
        lanes, machine = self._lanes()
        try:
            return self._hybrid_on(lanes, machine)
        except BaseException:
            lanes.device.close()
            raise

    def _hybrid_on(self, lanes: "_Lanes", machine: Machine) -> HybridExecutor:
        config, geometry = self.config, self.geometry
        settings = config.planner_settings()
        device = lanes.device
        cache = ExpertCache(
            self.store,
            device,
            lanes.clock,
            geometry,
            machine,
            settings,
            lanes.make_engine,
        )
        if config.device != "cuda":  # else done before the link was measured
            pin_store(self.store, device.pin)
        num_experts = geometry.num_layers * geometry.num_experts
        num_slots = count_slots(
            lanes.share,
            device.memory(),
            slot_bytes=cache.slot_bytes,
            # With these beside one for each expert, all can be resident.
            num_experts=num_experts + settings.extra_slots(num_experts),
            reserved_bytes=lanes.reserved_bytes,
        )
        start = STARTS.factory(config.start_content)
        heat = self._heat()
        cache.resize(num_slots, start(geometry, cache.set_sizes(num_slots), heat.before))
        executor = HybridExecutor(cache, lanes.kernels)
        executor.listeners.append(heat)
        sources = (config.prediction,) if config.prediction in SOURCES else ("residual",)
        if config.prediction in SOURCES or config.look_ahead:
            executor.foresee = self.runtime.look_ahead = self._look_ahead(sources)
        weakref.finalize(executor, _end, cache, heat)
        return executor

    def _look_ahead(self, sources: Sequence[str]) -> LookAhead:
        """Return what asks the routers ahead; `UnsupportedModelError` where none can be asked."""
        found = look_ahead(
            self.model,
            self.bound,
            self.store,
            sources,
            residuals_path=self.config.residuals,
            cache_path=self.config.cache_path,
        )
        if isinstance(found, str):
            name = type(self.model).__name__
            raise UnsupportedModelError(
                f"looking ahead ({sources[0]}) needs {name}'s routers, and {found}; "
                "choose another prediction, without look_ahead"
            )
        return found

    def _heat(self) -> Heat:
        name = f"{self.model.config.model_type}-{model_identity(self.model)}.npy"
        return Heat(self.geometry, self.config.cache_path / "heat" / name)

    def _lanes(self) -> tuple["_Lanes", Machine]:
        """Return the lanes that the options name, and what they cost."""
        if self.config.device == "cuda":
            return self._cuda_lanes()
        machine, is_real = self._machine(), self.config.clock == "real"
        lanes = self._real_lanes(machine) if is_real else self._virtual_lanes(machine)
        return lanes, machine

    def _cuda_lanes(self) -> tuple["_Lanes", Machine]:
        """Return a GPU's lanes."""
        config, geometry = self.config, self.geometry
        parts = cuda_parts(self.model, self.store, self.bound, config, geometry, self.call)
        lanes = _Lanes(
            parts.device,
            parts.clock,
            parts.kernels,
            parts.make_engine,
            parts.share,
            parts.reserved_bytes,
        )
        try:
            return lanes, self._machine_of(parts.profile)
        except BaseException:  # a profile without a shape like the model's
            parts.device.close()
            raise

    def _virtual_lanes(self, machine: Machine) -> "_Lanes":
        """Return lanes that take turns in this thread, while a virtual clock counts."""
        device = EmulatedDevice(available_bytes(), self.kernels)
        clock = Timeline(machine.profile, machine.shape)
        share = parse_gpu_memory(self.config.gpu_memory)
        return _Lanes(device, clock, self.kernels, VirtualCopyEngine, share)

    def _real_lanes(self, machine: Machine) -> "_Lanes":
        """Return lanes with threads of their own, which share this machine's cores."""
        config, clock = self.config, WallClock()
        threads, isa = self.kernels.num_threads, self.kernels.isa
        on_device = ExpertKernels(num_threads=threads, isa=isa, on_busy=clock.add_gpu)
        device = EmulatedDevice(available_bytes(), on_device, has_thread=True)
        rate = None if config.link_bandwidth is None else parse_bandwidth(config.link_bandwidth)

        def make_engine(store: HostStore, slots: Slots, geometry: Geometry, _: Clock) -> CopyThread:
            return CopyThread(store, slots, geometry, clock, bytes_per_second=rate)

        kernels = ExpertKernels(num_threads=threads, isa=isa, on_busy=clock.add_cpu)
        return _Lanes(device, clock, kernels, make_engine, parse_gpu_memory(config.gpu_memory))

    def _machine(self) -> Machine:
        """Return what things cost: by the profile that the options name, or as measured here."""
        config = self.config
        if config.profile is not None:
            return self._machine_of(load_profile(config.profile))
        return self._machine_of(with_emulated_gpu(self.measured(), config.emulated_speed))

    def _machine_of(self, profile: HardwareProfile) -> Machine:
        """Return a profile's machine, with the link that the options ask for."""
        if self.config.link_bandwidth is not None:
            profile = with_link(profile, parse_bandwidth(self.config.link_bandwidth))
        name = str(self.model.config.model_type)
        return Machine(profile, shape_for(profile, name, self.geometry))

    def measured(self, *, refresh: bool = False) -> HardwareProfile:
        """Return this machine's profile, kept or measured; binds the modules to nothing useful."""
        return measured_profile(
            self.model,
            self.store,
            self.bound,
            self.geometry,
            self.kernels,
            self.call,
            cache_dir=self.config.cache_path,
            refresh=refresh,
        )
