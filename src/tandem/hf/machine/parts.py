"""The inputs from which a hybrid executor is built: the observed model and a device's parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.core.errors import UnsupportedModelError
from tandem.core.units import parse_bandwidth
from tandem.experts.cache.clock import Clock
from tandem.experts.cache.expert_cache import EngineMaker, ExpertCache, Machine
from tandem.experts.cache.host_slots import READERS, HostSlots
from tandem.experts.cache.policy_tables import NATIVE_TABLES, host_slot_eviction
from tandem.experts.cache.sizing import MemoryShare
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.captured_steps import CapturedSteps, captured_layers
from tandem.experts.execution.device import Device
from tandem.experts.execution.executor import Executor
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.execution.look_ahead_routers import LookAheadRouter
from tandem.experts.measuring.profiler import MeasuredExperts, with_link
from tandem.experts.store.host_store import HostStore
from tandem.foreign_types import PreTrainedModel
from tandem.hardware.disk import measure_disk
from tandem.hardware.profiles import shape_for
from tandem.hf.config import OffloadConfig
from tandem.hf.experts import Bound, bind_all, expert_functions
from tandem.hf.lookahead.warm_up import WARM_UP_TOKENS, ExpertsCall, Observer, forward_tokens
from tandem.hf.runtime import Runtime
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.policy.cost import HardwareProfile
from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings
from tandem.policy.step_path import CAPTURE_SIZES, run_path
from tandem.sim.disk import HostShare
from tandem.sim.graph_trial import settled

_DISK_SECONDS = 0.05  # duration of the reads that measure a disk's rate


@dataclass(frozen=True, slots=True)
class ObservedModel:
    """A loaded model, the options of its experts, and how its experts modules are called."""

    model: PreTrainedModel
    store: HostStore
    bound: Bound
    options: OffloadConfig
    threads: CpuThreads
    geometry: Geometry
    call: ExpertsCall
    host_slots: HostSlots | None
    """Holds some of the experts in memory; None: all experts are in memory."""
    runs_in_order: bool
    """Whether each token passes through all layers of the store exactly once, in order."""
    look_ahead_routers: Sequence[LookAheadRouter | None] | None = None
    """The routers after the first one, for a graph that runs them ahead; None: no look-ahead, or no
    graph can run them. The entry of a router by token id, whose choice is known, is None."""

    @property
    def model_type(self) -> str:
        """The name of the model's architecture."""
        return str(self.model.config.model_type)

    @property
    def link_bytes_per_second(self) -> float | None:
        """The link's bandwidth in the options; None: the options set no bandwidth."""
        bandwidth = self.options.link_bandwidth
        return None if bandwidth is None else parse_bandwidth(bandwidth)

    def bind(self, executor: Executor) -> None:
        """Make the model's experts modules compute through an executor from now on."""
        bind_all(self.bound, executor)

    def functions(self) -> ExpertFunctions:
        """Return the activation and norm functions of the model's first experts module."""
        return expert_functions(self.bound[0][0])

    def cpu_kernels(self, on_busy: Callable[[float], None] | None = None) -> ExpertKernels:
        """Return new kernels on the model's threads; `on_busy` gets the seconds of every batch."""
        return ExpertKernels(self.threads, on_busy=on_busy)

    def experts(self, kernels: ExpertKernels) -> MeasuredExperts:
        """Return the model's experts for timing, computed by `kernels`."""
        return MeasuredExperts(
            store=self.store,
            geometry=self.geometry,
            functions=self.functions(),
            kernels=kernels,
            dtype=self.call.dtype,
            hidden_size=self.call.hidden_size,
        )

    def native_layers(self, cache: ExpertCache) -> list[_native.RoutedLayer] | None:
        """Return the layers in native form for captured steps; None if these cannot run the model.

        Captured steps are answered layer by layer, and would wait for a layer that a token skips.
        """
        if not self.runs_in_order:
            return None
        functions = {layer: expert_functions(module) for module, layer in self.bound}
        return captured_layers(cache, functions, self.call.dtype)

    def machine(self, profile: HardwareProfile) -> Machine:
        """Return the `Machine` that a profile gives for this model: costs and the path of steps.

        A link bandwidth in the options replaces the profile's. Times include the host's own work.
        If experts are on a disk whose rate the profile lacks, the rate is measured.
        """
        rate, slots = self.link_bytes_per_second, self.host_slots
        profile = profile if rate is None else with_link(profile, rate)
        if slots is not None and profile.disk is None:
            disk = measure_disk(
                slots.files, slots.slot_bytes, seconds=_DISK_SECONDS, depths=(READERS,)
            )
            profile = replace(profile, disk=disk)
        shape = shape_for(profile, self.model_type, self.geometry)
        path = run_path(profile, self.why_planned())
        return Machine(profile, profile.charged(shape, path.host_path), path)

    def why_planned(self) -> str | None:
        """Name the option that steps in one graph cannot follow, in words; None: no option."""
        if self.options.look_ahead and self.look_ahead_routers is None:
            return "look-ahead, as not each router is one product"
        return self.options.why_planned()

    def settings(self, machine: Machine, num_slots: int) -> PlannerSettings:
        """Return the planner's settings for a machine whose GPU has `num_slots` slots.

        Steps in one graph fetch and prefetch if a simulated trial finds this faster. With experts
        on a disk, they prefetch and run routers ahead only if the options say so.
        """
        settings, slots, memory = self.options.planner_settings(), self.host_slots, None
        if slots is not None:
            make_eviction = host_slot_eviction(self.options.eviction)
            memory = HostShare(share=slots.share, make_eviction=make_eviction)
        if machine.path.in_graph:
            parts = machine.profile, machine.shape, self.geometry, num_slots
            settings = settled(settings, *parts, tables=NATIVE_TABLES, memory=memory)
            if slots is None:
                return settings
        # A GPU's steps are one graph, even if the profile does not know what that costs.
        is_graph = machine.path.in_graph or settings.copies_prompts
        asking_sizes = CAPTURE_SIZES if machine.path.in_graph and settings.may_ask else ()
        return settings.with_predictions((), asking_sizes) if is_graph else settings


def observe(model: PreTrainedModel, runtime: Runtime) -> ObservedModel:
    """Run a few tokens and record how the experts modules are called.

    The modules stay bound to the recording executor, so the caller must bind them again. Raises
    `UnsupportedModelError` for a model that cannot run on text alone.
    """
    observer, store = Observer(runtime.cpu_executor()), runtime.store
    bind_all(runtime.bound, observer)
    name = type(model).__name__
    try:
        forward_tokens(model, WARM_UP_TOKENS)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot be run on text alone ({error}), so its experts cannot be observed; "
            "load it with device='cpu'"
        ) from error
    if not observer.calls:
        raise UnsupportedModelError(
            f"{name} used none of its experts for a text; load it with device='cpu'"
        )
    most_experts = max(layer.arrivals.num_experts for layer in store)
    geometry = Geometry(len(store), most_experts, observer.calls[0].top_k)
    order = [call.layer for call in observer.calls]
    return ObservedModel(
        model, store, runtime.bound, runtime.options, runtime.threads, geometry, observer.calls[0],
        runtime.host_slots,
        runs_in_order=order == list(range(len(store))),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """A device with its clock and link, the CPU's kernels, and the costs of all of them."""

    device: Device
    clock: Clock
    kernels: ExpertKernels
    make_engine: EngineMaker
    machine: Machine
    share: MemoryShare
    reserved_bytes: int = 0
    """Bytes of the share reserved for dense parts, KV cache and workspace."""
    captured: Callable[[ExpertCache], CapturedSteps | None] = lambda cache: None
    """Returns the captured steps, which compute small decode steps without plans; None if the
    device has none."""
    make_executor: Callable[[ExpertCache, Device, ExpertKernels], HybridExecutor] = HybridExecutor
