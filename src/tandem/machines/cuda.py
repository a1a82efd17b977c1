"""A GPU for a loaded model: its streams, its measured profile, and the division of its memory."""

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tqdm import tqdm
from transformers.utils import logging

from tandem.checkpoint.mapped_files import find_mapped
from tandem.core.errors import ConfigError, TandemWarning
from tandem.devices.cuda.checks import Gpu, require_cuda, require_dtype
from tandem.devices.cuda.copies import CudaCopyEngine, Link
from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.hand_over_trial import find_signals, graph_costs
from tandem.devices.cuda.handed_steps import HandedSteps, handed_steps
from tandem.devices.cuda.kernels import DeviceKernels, TorchKernels, best_kernels
from tandem.devices.cuda.linear import linear_compilations
from tandem.devices.cuda.profile import measure_device
from tandem.devices.cuda.streams import CudaStreams, Stream
from tandem.experts.cache.clock import Clock, WallClock
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.sizing import (
    DeviceMemory,
    MemoryShare,
    budget_bytes,
    parse_gpu_memory,
)
from tandem.experts.cache.slots import Slots
from tandem.experts.execution import executor as cpu_executor
from tandem.experts.execution.executor import CpuExecutor, Executor
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.pinning import pin_store
from tandem.foreign_types import PreTrainedModel
from tandem.hardware.profiles import load_profile, save_profile
from tandem.hf.compat import cache_argument
from tandem.hf.experts import expert_functions
from tandem.hf.lookahead.warm_up import ExpertsCall, NoExperts, forward_tokens, warm_up_ids
from tandem.hf.machine.parts import DeviceParts, ObservedModel
from tandem.hf.machine.profile import kept_profile, measured_profile, profile_key
from tandem.hf.runtime import Runtime
from tandem.kernels.dense import CpuThreads
from tandem.kernels.native import TOKEN_DTYPES
from tandem.policy.cost import HardwareProfile, HostCosts
from tandem.policy.plan import Geometry

# Tokens of KV cache whose memory is reserved before experts get the rest. Longer texts take memory
# from the expert cache when they need it.
KV_TOKENS = 4096
_KV_SAMPLE_TOKENS = 64
# Increase it when the measurement of a GPU changes: older profiles are then measured again.
_MEASUREMENT = 6
# Shorter compilations show nothing: the kernels were on disk.
_SHOWN_AFTER_SECONDS = 1.0


def device_parts(
    observed: ObservedModel,
    *,
    streams: CudaStreams | None = None,
    device_kernels: DeviceKernels | None = None,
) -> DeviceParts:
    """Compile the kernels, pin the store, measure the GPU and divide its memory.

    Raises `TandemError` if the GPU, the model's devices or the profile do not fit; then no memory
    stays pinned, and GPU memory is not limited. Tests replace the GPU by `streams` and
    `device_kernels`. The caller must bind the experts modules again afterwards.
    """
    model, options = observed.model, observed.options
    _say_if_planned(observed)
    gpu: Gpu | None = None
    if streams is None:
        gpu = require_cuda(index=require_on_one_gpu(model))
        require_dtype(gpu, model.dtype)
        streams = CudaStreams(model.device.index or 0)
    device_kernels = device_kernels or best_kernels(gpu)
    clock = WallClock()
    device = CudaDevice(
        streams,
        compiled_kernels(device_kernels, observed, streams),
        on_busy=clock.add_gpu,
        is_watched=clock.is_watched,
    )
    kernels = observed.cpu_kernels(clock.add_cpu)
    if gpu is not None:  # a CPU twin runs steps in torch
        observed.bind(NoExperts(observed.store))
        _compile_steps(model, streams)
    try:
        if observed.host_slots is not None:
            observed.host_slots.pin(device.pin)
        else:
            pin_store(observed.store, device.pin, is_mapped=find_mapped())
        if options.profile is not None:
            profile = load_profile(options.profile)
        else:
            profile = _profile(observed, device, kernels)
        share, reserved = _share(observed, streams)
        machine = observed.machine(profile)  # raises if the profile has no matching shape
    except BaseException:
        device.close()
        raise
    link = Link(profile.link_bytes_per_second, observed.link_bytes_per_second)

    def make_engine(store: HostStore, slots: Slots, geometry: Geometry, _: Clock) -> CudaCopyEngine:
        return CudaCopyEngine(store, slots, geometry, clock, streams, device.events, link)

    captured = partial(_handed_steps, observed, device)
    return DeviceParts(device, clock, kernels, make_engine, machine, share, reserved, captured)


def _say_if_planned(observed: ObservedModel) -> None:
    """Warn if an option prevents decode steps from being one graph, which is faster."""
    why = observed.why_planned()
    if why is not None and observed.options.decode_graph:
        warnings.warn(
            "decode steps are captured with a break at the experts of each layer, slower: one "
            f"graph cannot follow {why}",
            TandemWarning,
            stacklevel=2,
        )


def _handed_steps(
    observed: ObservedModel, device: CudaDevice, cache: ExpertCache
) -> HandedSteps | None:
    """Return the object that runs each step as one graph; None if steps need graph segments."""
    if observed.why_planned() is not None:
        return None
    layers, rate = observed.native_layers(cache), observed.link_bytes_per_second
    if layers is None:
        return None
    steps = handed_steps(
        cache,
        layers,
        observed.threads,
        observed.call.dtype,
        device,
        rate,
        observed.look_ahead_routers,
    )
    if steps is not None:
        _run_all(steps.compilations(), "Compiling decode steps", device.streams)
    return steps


def compiled_kernels(
    kernels: DeviceKernels, observed: ObservedModel, streams: CudaStreams
) -> DeviceKernels:
    """Return `kernels`, compiled for a model's layers; if that fails, warn and return torch's."""
    call = observed.call
    layers = [(observed.store[layer], expert_functions(x)) for x, layer in observed.bound]
    works = kernels.compilations(layers, call.dtype, call.top_k, streams.device)
    try:
        _run_all(works, "Compiling GPU kernels", streams)
    except Exception as error:  # Triton's compilers and tools raise what they like
        first_line = str(error).partition("\n")[0]
        warnings.warn(
            f"Triton cannot compile its kernels here ({first_line}), so the GPU computes experts "
            "with torch, many times slower; Triton needs a C compiler (Debian, Ubuntu: apt install "
            "gcc) and Python's headers (python3-dev)",
            stacklevel=2,
        )
        return TorchKernels()
    return kernels


def without_experts(model: PreTrainedModel, runtime: Runtime) -> Executor:
    """Return the executor of a dense model on a GPU, after compiling its decode steps.

    Limits GPU memory to the budget; closing the executor lifts the limit.
    """
    gpu = require_cuda(index=require_on_one_gpu(model))
    require_dtype(gpu, model.dtype)
    streams = CudaStreams(model.device.index or 0)
    _compile_steps(model, streams)
    share, memory = parse_gpu_memory(runtime.options.gpu_memory), streams.memory()
    streams.limit(budget_bytes(_with_taken(share, memory, streams.taken_bytes()), memory))
    return NoExpertsOnGpu(runtime.store, runtime.threads, streams)


class NoExpertsOnGpu(CpuExecutor):
    """The executor of a dense model on a GPU; closing it lifts the limit of GPU memory."""

    def __init__(self, store: HostStore, threads: CpuThreads, streams: CudaStreams) -> None:
        """Take an empty store, and the streams whose memory the caller has limited.

        The limit ends when the executor is closed or garbage-collected.
        """
        super().__init__(store, threads)
        self._end = weakref.finalize(self, streams.limit, None)
        self._end.atexit = False

    def close(self) -> None:
        """Lift the limit of GPU memory."""
        self._end()


def _compile_steps(model: PreTrainedModel, streams: CudaStreams) -> None:
    """Compile the GPU kernels of decode steps, except the experts', before the first step."""
    # Imported here because stepping needs all of Transformers, which is not loaded yet when this
    # module is imported.
    from tandem.decode.cuda.compiling import step_compilations

    linear = linear_compilations(model, streams.device)
    _run_all([*linear, *step_compilations(model)], "Compiling decode steps", streams)
    gc.collect()  # slots reference their steps; their memory is counted next


def _run_all(works: Sequence[Callable[[], None]], label: str, streams: CudaStreams) -> None:
    """Call `works` on the compute stream, with a progress bar if they take long, and wait."""
    is_hidden = not logging.is_progress_bar_enabled()
    for work in tqdm(works, label, disable=is_hidden, delay=_SHOWN_AFTER_SECONDS):
        streams.run(Stream.COMPUTE, work)
    streams.synchronize()


def require_on_one_gpu(model: PreTrainedModel) -> int:
    """Return the index of the GPU that holds the dense parts.

    Raises `ConfigError` if no GPU or several GPUs hold them.
    """
    if model.device.type != "cuda":
        raise ConfigError(
            f"device is cuda, but the model's dense parts are on {model.device}; load it with "
            "device_map='cuda'"
        )
    # A single stream keeps operations in order. The experts' placeholders stay on the CPU.
    gpus = sorted({str(p.device) for p in model.parameters() if p.device.type == "cuda"})
    if len(gpus) > 1:
        raise ConfigError(
            f"the model's dense parts are on {', '.join(gpus)}, and Tandem uses one GPU; load it "
            "with device_map={'': 0}"
        )
    return int(model.device.index or 0)


def _share(observed: ObservedModel, streams: CudaStreams) -> tuple[MemoryShare, int]:
    """Limit GPU memory to the budget; return the share, and the bytes that experts cannot use.

    These bytes are the memory in use, the workspace, and a KV cache of `KV_TOKENS` tokens.
    """
    model, store = observed.model, observed.store
    observed.bind(NoExperts(store))
    tokens = cpu_executor.MAX_TOKENS_AT_ONCE

    def read_prompt() -> None:
        forward_tokens(model, tokens, num_logits=1)  # in the same way as prompts

    workspace = streams.peak_bytes(read_prompt)
    workspace += workspace_bytes(store, observed.call, tokens)
    share, memory = parse_gpu_memory(observed.options.gpu_memory), streams.memory()
    taken = streams.taken_bytes()
    share = _with_taken(share, memory, taken)
    budget = budget_bytes(share, memory)
    streams.limit(budget)
    return share, taken + workspace + kv_bytes(model, KV_TOKENS)


def _with_taken(share: MemoryShare, memory: DeviceMemory, taken: int) -> MemoryShare:
    """Return `share`; an automatic share becomes a fixed one: its budget plus `taken` bytes."""
    if share.num_bytes is None and share.fraction is None:
        return MemoryShare(num_bytes=taken + budget_bytes(share, memory))
    return share


def workspace_bytes(store: HostStore, call: ExpertsCall, num_tokens: int) -> int:
    """Return the bytes besides weights that a layer's experts need for `num_tokens` tokens."""
    inner = max(layer.arrivals.shapes["down_proj"][1:] for layer in store)
    num_routed, itemsize = num_tokens * call.top_k, call.dtype.itemsize
    rows = num_routed * (4 * call.hidden_size + itemsize * max(inner))
    return rows + num_tokens * call.hidden_size * (4 + itemsize)


def kv_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    """Return the bytes that a KV cache takes for one sequence of `num_tokens` tokens.

    If Tandem has no sequence slots for the model, a run of a few tokens measures the model's own KV
    cache.
    """
    from tandem.decode.cuda.slots import slot_bytes

    in_slots = slot_bytes(model, warm_up_ids(model, 1).tolist(), num_tokens)
    if in_slots is not None:
        return in_slots
    ids = torch.arange(_KV_SAMPLE_TOKENS, device=model.device)[None] + 11
    vocabulary = model.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        outputs = model(input_ids=ids % vocabulary, use_cache=True)
    cache = outputs.get(cache_argument(model))  # None for a model that generates no text
    layers = () if cache is None else vars(cache).get("layers", ())
    tensors = [vars(layer).get(name) for layer in layers for name in ("keys", "values")]
    num_bytes = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
    return -(-num_bytes * num_tokens // _KV_SAMPLE_TOKENS)


def _profile(
    observed: ObservedModel, device: CudaDevice, kernels: ExpertKernels
) -> HardwareProfile:
    """Return this machine's profile for a model and a GPU; measure and keep it if missing."""
    model, store = observed.model, observed.store
    folder = "".join(c if c.isalnum() else "-" for c in device.streams.name.lower())
    directory = observed.options.cache_path / folder
    name = f"gpu-{observed.model_type}-{profile_key(observed)}-{_MEASUREMENT}.json"
    kept = directory / "profiles" / name
    known = kept_profile(kept)
    if known is not None:
        return known
    graph: Callable[[float], HostCosts] | None = None
    # The base profile's dense parts are timed on this GPU, so its CPU part is not shared with other
    # devices.
    base = measured_profile(observed, cache_dir=directory)
    if model.device.type == "cuda":  # a CPU twin has no captures
        # See above: stepping needs all of Transformers.
        from tandem.decode.cuda.dense_cost import with_captured_steps
        from tandem.decode.cuda.slots import make_cuda_capture

        capture, call = make_cuda_capture(model), observed.call
        base = with_captured_steps(base, model, store, observed.bound, device, capture)
        signals = find_signals(device.streams) if call.dtype in TOKEN_DTYPES else None
        if signals is not None:
            graph = partial(
                graph_costs, signals, device.streams, call.hidden_size, make_capture=capture
            )
    profile = measure_device(base, device, observed.experts(kernels), graph)
    save_profile(profile, kept)
    return profile
