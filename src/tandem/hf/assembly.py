"""Builds the executor of a loaded model's experts, and connects the model to it.

Only this module chooses the executor's parts, by the options: device, clock, planner and kernels.
No part knows how another part is made.
"""

import dataclasses
import importlib
import weakref
from collections.abc import Callable

from tandem.core.errors import UnsupportedModelError
from tandem.devices import kind_of
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.heat import Heat
from tandem.experts.cache.sizing import count_slots
from tandem.experts.cache.start import STARTS
from tandem.experts.execution.captured_steps import CapturedSteps
from tandem.experts.execution.executor import Executor
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.foreign_types import PreTrainedModel
from tandem.hardware.profiles import save_profile
from tandem.hf.config import OffloadConfig, parse_dense_dtype
from tandem.hf.dense import (
    give_fp32_logits,
    has_kernels,
    is_quantised,
    pack_by_path,
    pack_dense_layers,
    pack_for_device,
    place_on,
    share_threads,
)
from tandem.hf.dense_files import take_stored_layers
from tandem.hf.dense_place import keep_embeddings_on_host, move_dense_parts
from tandem.hf.identity import model_identity
from tandem.hf.lookahead.look_ahead import SOURCES, LookAhead, look_ahead
from tandem.hf.machine.parts import DeviceParts, ObservedModel, observe
from tandem.hf.machine.profile import measured_profile, profile_path
from tandem.hf.runtime import Runtime, require_experts, require_runtime
from tandem.policy.cost import HardwareProfile


def assemble(
    model: PreTrainedModel,
    runtime: Runtime,
    options: OffloadConfig,
    read_experts: Callable[[], None] = lambda: None,
) -> None:
    """Pack and place a model's dense parts as the options say, and build its experts' executor.

    An earlier executor is closed first. `read_experts` is called once the dense parts have their
    memory; it must read the experts into the memory that they run from. Raises `TandemError`.
    """
    runtime.end_executor()
    runtime.choose(options)
    runtime.use(runtime.cpu_executor())  # steps run while the new executor's device is measured
    take_stored_layers(model, place_on(runtime.device, runtime.threads), runtime.threads)
    if runtime.device.type == "cpu":
        pack_by_path(model, options.dense_formats or {}, runtime.threads)
        pack_dense_layers(model, options.dense_dtype, runtime.threads)
    else:
        _bring_dense_parts(model, runtime, options)
    share_threads(model, runtime.threads)
    give_fp32_logits(model)
    read_experts()
    has_gpu = options.device != "cpu" or runtime.device.type != "cpu"
    if has_gpu and not len(runtime.store):
        runtime.use(_on_gpu_alone(model, runtime))
    elif options.device == "cpu":
        runtime.use(runtime.cpu_executor())
    else:
        with runtime.using(runtime.executor):  # measuring binds the experts modules to others
            executor = _hybrid(observe(model, runtime), runtime)
        runtime.use(executor)


def _bring_dense_parts(model: PreTrainedModel, runtime: Runtime, options: OffloadConfig) -> None:
    """Pack linear layers if the GPU has kernels for them, and move the dense parts to the GPU.

    Embeddings stay on the host if possible. A step reads all dense parts, so with eight bits
    instead of sixteen they take half the time and memory.
    """
    device, fmt = runtime.device, parse_dense_dtype(options.dense_dtype)
    can_pack = is_quantised(model) and has_kernels()
    if fmt is not None and (can_pack or options.dense_dtype != "auto"):
        formats = options.dense_formats or {}  # from a packed checkpoint
        kept = [path for path, name in formats.items() if parse_dense_dtype(name) is None]
        pack_for_device(model, fmt, place_on(device, runtime.threads), kept)
    keep_embeddings_on_host(model, device)
    move_dense_parts(model, device)


def _on_gpu_alone(model: PreTrainedModel, runtime: Runtime) -> Executor:
    """Return the executor of a dense model that is on a GPU as a whole."""
    module = importlib.import_module(kind_of("cuda").machine)
    found: Executor = module.without_experts(model, runtime)
    return found


def profile_of(model: PreTrainedModel, *, refresh: bool = False) -> HardwareProfile:
    """Return this machine's profile for a loaded model; measure it if missing, or on `refresh`."""
    runtime = require_experts(model)
    with runtime.using(runtime.executor):  # measuring binds the experts modules to other experts
        return measured_profile(observe(model, runtime), refresh=refresh)


def keep_profile_of(model: PreTrainedModel, profile: HardwareProfile) -> None:
    """Keep a profile for a loaded model on this machine; `profile_of` returns it from now on."""
    runtime = require_runtime(model)
    with runtime.using(runtime.executor):
        save_profile(profile, profile_path(observe(model, runtime)))


def _hybrid(observed: ObservedModel, runtime: Runtime) -> HybridExecutor:
    """Return an executor with a filled expert cache; an error closes device and look-ahead."""
    module = importlib.import_module(kind_of(observed.options.device).machine)
    with runtime.looking_ahead(_look_ahead(observed)) as ahead:
        if ahead is not None:
            observed = dataclasses.replace(observed, look_ahead_routers=ahead.for_graphs())
        parts: DeviceParts = module.device_parts(observed)
        try:
            return _hybrid_on(parts, observed, runtime)
        except BaseException:
            parts.device.close()
            raise


def _hybrid_on(parts: DeviceParts, observed: ObservedModel, runtime: Runtime) -> HybridExecutor:
    options, geometry, device = observed.options, observed.geometry, parts.device
    num_experts = geometry.num_layers * geometry.num_experts
    num_slots = count_slots(
        parts.share,
        device.memory(),
        slot_bytes=max(layer.image_bytes for layer in observed.store),
        # One slot for each expert and these, and all experts can be resident.
        num_experts=options.planner_settings().slots_for(num_experts),
        reserved_bytes=parts.reserved_bytes,
    )
    settings = observed.settings(parts.machine, num_slots)
    cache = ExpertCache(
        observed.store, device, parts.clock, geometry, parts.machine, settings, parts.make_engine
    )
    start = STARTS.factory(options.start_content)
    name = f"{observed.model_type}-{model_identity(observed.model)}.npy"
    heat = Heat(geometry, options.cache_path / "heat" / name)
    cache.resize(num_slots, start(geometry, cache.set_sizes(num_slots), heat.before))
    executor = parts.make_executor(cache, device, parts.kernels)
    executor.listeners.append(heat)
    executor.look_ahead = runtime.look_ahead
    executor.captured = parts.captured(cache)
    weakref.finalize(executor, _end, cache, heat, executor.captured)
    return executor


def _look_ahead(observed: ObservedModel) -> LookAhead | None:
    """Return the look-ahead that the options request; None if they request none.

    Raises `UnsupportedModelError` if the model's routers cannot be run ahead.
    """
    options = observed.options
    requested = options.prediction if options.prediction in SOURCES else None
    if requested is None and not options.look_ahead:
        return None
    source = requested or "residual"
    found = look_ahead(
        observed.model,
        observed.bound,
        observed.store,
        (source,),
        residuals_path=options.residuals,
        cache_path=options.cache_path,
    )
    if isinstance(found, str):
        name = type(observed.model).__name__
        raise UnsupportedModelError(
            f"looking ahead ({source}) needs {name}'s routers, and {found}; "
            "choose another prediction, without look_ahead"
        )
    return found


def _end(cache: ExpertCache, heat: Heat, captured: CapturedSteps | None) -> None:
    """Save the heat and stop the threads, when an executor is freed or the program ends."""
    heat.save()
    if captured is not None:
        captured.close()
    cache.close()
