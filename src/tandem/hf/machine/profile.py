"""The hardware profile of this machine for a loaded model: measured once, then kept."""

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path

from tandem.core.errors import FileFormatError, TandemWarning
from tandem.experts.measuring.profiler import measure_profile
from tandem.hardware.profiles import load_profile, save_profile
from tandem.hf.dense_files import packed_formats
from tandem.hf.lookahead.warm_up import NoExperts, forward_tokens
from tandem.hf.machine.parts import ObservedModel
from tandem.kernels.cpu import detect_cpu
from tandem.policy.cost import HardwareProfile, interpolate

# Increase it when the measurement changes: older profiles are then measured again.
MEASUREMENT = 1
DENSE_TOKEN_COUNTS = (1, 32, 256)
DENSE_REPETITIONS = 3


def measured_profile(
    observed: ObservedModel, *, cache_dir: Path | None = None, refresh: bool = False
) -> HardwareProfile:
    """Return this machine's profile for a model; measure and keep it if missing, or on `refresh`.

    The caller must bind the experts modules again afterwards.
    """
    path = profile_path(observed, cache_dir)
    kept = None if refresh else kept_profile(path)
    if kept is not None:
        return kept
    experts = observed.experts(observed.cpu_kernels())
    profile = measure_profile(
        experts, name=observed.model_type, dense_seconds=_dense_seconds(observed)
    )
    save_profile(profile, path)
    return profile


def profile_path(observed: ObservedModel, cache_dir: Path | None = None) -> Path:
    """Return the path of the file that keeps the profile for a model."""
    directory = (cache_dir or observed.options.cache_path) / "profiles"
    return directory / f"{observed.model_type}-{profile_key(observed)}.json"


def kept_profile(path: Path) -> HardwareProfile | None:
    """Return a kept profile; None if there is no file or, with a warning, an unreadable one."""
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


def profile_key(observed: ObservedModel) -> str:
    """Return 16 hex digits that stand for everything that measured times depend on."""
    cpu, options, layers = detect_cpu(), observed.options, observed.store
    shapes = [(layer.arrivals.shapes, layer.image_bytes, type(layer).__name__) for layer in layers]
    threads, isa = options.num_threads, options.isa or ""
    parts = (MEASUREMENT, cpu.model_name, cpu.instruction_sets, threads, isa)
    dense = sorted(set(packed_formats(observed.model).values()))
    text = repr((*parts, observed.geometry, shapes, str(observed.call.dtype), *dense))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _dense_seconds(observed: ObservedModel) -> Callable[[int], float]:
    """Time everything but the experts; return the seconds per MoE layer as a function of tokens."""
    model, store = observed.model, observed.store
    observed.bind(NoExperts(store))
    seconds = []
    for count in DENSE_TOKEN_COUNTS:
        forward_tokens(model, count)  # memory and threads warm up
        times = [forward_tokens(model, count) for _ in range(DENSE_REPETITIONS)]
        seconds.append(min(times) / len(store))
    return lambda count: interpolate(DENSE_TOKEN_COUNTS, seconds, count)
