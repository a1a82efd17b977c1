"""The hardware profile of this machine for a loaded model: measured on first load, then kept."""

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from tandem.core.errors import FileFormatError, TandemWarning
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.measuring.profiler import measure_profile
from tandem.experts.store.host_store import HostStore
from tandem.hardware.profiles import load_profile, save_profile
from tandem.hf.dense import packed_layers
from tandem.hf.experts import Bound, bind_all, expert_functions
from tandem.hf.lookahead.warm_up import ExpertsCall, NoExperts, forward_tokens
from tandem.kernels.cpu import detect_cpu
from tandem.policy.cost import HardwareProfile, interpolate
from tandem.policy.plan import Geometry

# Raise it when what is measured changes: older profiles are then measured anew.
MEASUREMENT = 1
DENSE_TOKEN_COUNTS = (1, 32, 256)
DENSE_REPETITIONS = 3


def measured_profile(
    model: Any,
    store: HostStore,
    bound: Bound,
    geometry: Geometry,
    kernels: ExpertKernels,
    call: ExpertsCall,
    *,
    cache_dir: Path,
    refresh: bool = False,
) -> HardwareProfile:
    """Return the kept profile of this processor, format and shape; measure it where there is none.

    The experts modules are bound to nothing useful afterwards: bind them anew.
    """
    name = str(model.config.model_type)
    key = profile_key(model, store, geometry, kernels, call)
    path = cache_dir / "profiles" / f"{name}-{key}.json"
    kept = None if refresh else kept_profile(path)
    if kept is not None:
        return kept
    profile = measure_profile(
        store,
        geometry,
        expert_functions(bound[0][0]),
        kernels,
        name=name,
        dtype=call.dtype,
        hidden_size=call.hidden_size,
        dense_seconds=_dense_seconds(model, store, bound),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(profile, path)
    return profile


def kept_profile(path: Path) -> HardwareProfile | None:
    """Read a kept profile; None where there is none, or none that can be read, which is said."""
    if not path.is_file():
        return None
    try:
        return load_profile(str(path))
    except (FileFormatError, OSError) as error:
        warnings.warn(
            f"the kept profile cannot be used ({error}); measuring again",
            TandemWarning,
            stacklevel=2,
        )
        return None


def profile_key(
    model: nn.Module,
    store: HostStore,
    geometry: Geometry,
    kernels: ExpertKernels,
    call: ExpertsCall,
) -> str:
    """Return a hash of what measured times depend on."""
    cpu = detect_cpu()
    shapes = [(layer.arrivals.shapes, layer.image_bytes, type(layer).__name__) for layer in store]
    parts = (MEASUREMENT, cpu.model_name, cpu.instruction_sets, kernels.num_threads, kernels.isa)
    dense = sorted({linear.packed.matrix.format.name for _, linear in packed_layers(model)})
    text = repr((*parts, geometry, shapes, str(call.dtype), *dense))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _dense_seconds(model: Any, store: HostStore, bound: Bound) -> Callable[[int], float]:
    """Time everything but the experts, per MoE layer, and return it by token count."""
    bind_all(bound, NoExperts(store))
    seconds = []
    for count in DENSE_TOKEN_COUNTS:
        forward_tokens(model, count)  # memory and threads warm up
        times = [forward_tokens(model, count) for _ in range(DENSE_REPETITIONS)]
        seconds.append(min(times) / len(store))
    return lambda count: interpolate(DENSE_TOKEN_COUNTS, seconds, count)
