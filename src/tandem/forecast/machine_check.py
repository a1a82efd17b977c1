"""Checks this machine for Tandem by measuring: each finding is good, slow or broken.

Findings that are not good come with a remedy.
"""

import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tandem.bench.kernels import Ceiling, KernelBench
from tandem.checkpoint.sources.gguf import read_gguf_header
from tandem.core.units import format_bytes
from tandem.experts.store import host_memory
from tandem.forecast.completeness import require_complete
from tandem.forecast.gpu_check import check_gpu
from tandem.forecast.self_check import check_model
from tandem.forecast.windows_check import Finding, check_place, check_windows
from tandem.hf.checkpoint import AnyCheckpoint, GgufCheckpoint
from tandem.hf.compat import OLDEST_SUPPORTED, untested_version
from tandem.hf.config import OffloadConfig
from tandem.hf.packed_reading import verify_files
from tandem.kernels import _native
from tandem.kernels.cpu import detect_cpu, usable_topology

# One channel of DDR4 gives about 20 GB/s. Below this limit decoding is slower than reading aloud.
_SLOW_READ_GIGABYTES = 10.0
_LITTLE_DISK_BYTES = 20 << 30
_LITTLE_MEMORY_SHARE = 0.25
_SAMPLES = 5


def check_machine(cache: Path, *, num_threads: int | None, isa: str) -> Iterator[Finding]:
    """Yield the findings, the most important first; takes a second or two."""
    yield _processor(isa)
    yield _cores()
    yield _memory()
    yield _bandwidth(num_threads or detect_cpu().num_threads, isa)
    total = host_memory.total_bytes()
    yield from check_windows("huge pages", "Windows", "memory of the PC", total_bytes=total)
    yield from check_gpu()
    yield from _versions()
    yield _disk(cache)
    yield _cache(cache)
    yield from check_place("the cache", cache)


def check_model_files(checkpoint: AnyCheckpoint, *, has_progress: bool = False) -> Finding:
    """Verify a packed checkpoint's files; for other checkpoints check that no tensor is missing.

    Raises `ModelError` for damaged files and missing tensors.
    """
    require_complete(checkpoint)
    if isinstance(checkpoint, GgufCheckpoint):
        tensors = len(read_gguf_header(checkpoint.path).tensors)
        count = len(checkpoint.weight_files)
        return Finding(
            "files", "good", f"{count} whole GGUF file{'s' * (count > 1)} with {tensors} tensors"
        )
    if not checkpoint.is_packed:
        files, tensors = len(checkpoint.weight_files), len(checkpoint.files.entries)
        return Finding("files", "good", f"{files} whole files with {tensors} tensors")
    checked = verify_files(checkpoint, has_progress=has_progress)
    if not checked:
        return Finding("files", "slow", "packed without checksums", "pack it again to have them")
    return Finding("files", "good", f"{checked} files have their checksums")


def check_model_kernels(checkpoint: AnyCheckpoint, offload: OffloadConfig) -> Finding:
    """Return a finding on whether kernels and reference agree on a model's first layers."""
    found = check_model(checkpoint, offload)
    text = (
        f"{found.layers} layers, {found.tokens} tokens: KL {found.kl:.2g} nats, top-1 "
        f"{found.top1:.0%} against the reference"
    )
    if found.is_good:
        return Finding("kernels", "good", text)
    remedy = (
        "the kernels compute wrongly here: try TANDEM_ISA=portable, and report this line with the "
        "processor's name"
    )
    return Finding("kernels", "broken", text, remedy)


def _processor(isa: str) -> Finding:
    cpu, available = detect_cpu(), _native.available_isas()
    if isa and isa not in available:
        return Finding(
            "processor", "broken", f"TANDEM_ISA is {isa}, the processor has {', '.join(available)}",
            "unset TANDEM_ISA",
        )  # fmt: skip
    engine = _native.ExpertEngine(1, isa).isa
    text = f"{cpu.model_name}; kernels for {engine} (of {', '.join(available)})"
    if engine == "portable":
        return Finding(
            "processor", "slow", text,
            "these are plain C++: expect a tenth of the speed of a processor with AVX2 or newer",
        )  # fmt: skip
    return Finding("processor", "good", text)


def _cores() -> Finding:
    topology = usable_topology()
    quota, text = topology.quota, topology.describe()
    if quota is not None and quota < len(topology.fast_cores):
        return Finding("cores", "slow", text, "raise the container's limit")
    return Finding("cores", "good", text)


def _memory() -> Finding:
    total, free = host_memory.total_bytes(), host_memory.available_bytes()
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < _LITTLE_MEMORY_SHARE * total:
        return Finding("memory", "slow", text, "close other programs before loading a model")
    return Finding("memory", "good", text)


def _bandwidth(num_threads: int, isa: str) -> Finding:
    available = _native.available_isas()
    bench = KernelBench(num_threads=num_threads, isa=isa if isa in available else "")
    best = max((bench.ceiling() for _ in range(_SAMPLES)), key=_read_rate)
    rate = _read_rate(best)
    text = f"reads {rate:.1f} GB/s, {best.int8_gops:.0f} int8 Gop/s with {num_threads} threads"
    if rate < _SLOW_READ_GIGABYTES:
        return Finding(
            "bandwidth", "slow", text,
            "decoding is bound by it: use all memory channels, stop other programs, or choose "
            "smaller experts (int4)",
        )  # fmt: skip
    return Finding("bandwidth", "good", text)


def _read_rate(ceiling: Ceiling) -> float:
    return ceiling.read_gigabytes_per_second


def _versions() -> Iterator[Finding]:
    native = f"instruction sets {', '.join(_native.available_isas())}"
    yield Finding("native build", "good", native)
    for name, oldest in OLDEST_SUPPORTED.items():
        found = version(name)
        if tuple(int(part) for part in found.split(".")[:2]) < oldest:
            least = ".".join(map(str, oldest))
            yield Finding(
                name, "broken", f"{found}, older than {least}",
                f"pip install --upgrade '{name}>={least}'",
            )  # fmt: skip
        elif (why := untested_version(name)) is not None:
            yield Finding(name, "slow", found, why)
        else:
            yield Finding(name, "good", found)


def _disk(cache: Path) -> Finding:
    place = next(p for p in (cache, *cache.parents) if p.exists())
    free = shutil.disk_usage(place).free
    text = f"{format_bytes(free)} free at {cache}"
    if not os.access(place, os.W_OK):
        return Finding(
            "disk",
            "broken",
            f"{cache} cannot be written",
            "set TANDEM_CACHE to a directory of yours",
        )
    if free < _LITTLE_DISK_BYTES:
        return Finding(
            "disk", "slow", text, "set TANDEM_CACHE and HF_HOME to a larger disk before downloading"
        )
    return Finding("disk", "good", text)


def _cache(cache: Path) -> Finding:
    sizes = (
        {
            child.name: sum(file.stat().st_size for file in child.rglob("*") if file.is_file())
            for child in sorted(cache.iterdir())
            if child.is_dir()
        }
        if cache.is_dir()
        else {}
    )
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    return Finding("cache", "good", text or "empty")
