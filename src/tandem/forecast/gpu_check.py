"""Checks the GPU, its driver and the PCIe link to it: lines of `tandem doctor`."""

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from tandem.core.errors import CapacityError
from tandem.core.units import format_bytes
from tandem.devices.cuda.checks import Gpu, Probe, require_cuda
from tandem.devices.cuda.hand_over_trial import find_signals
from tandem.devices.cuda.signals import Signals
from tandem.devices.cuda.streams import CudaStreams, Stream
from tandem.experts.cache.sizing import OutOfDeviceMemoryError
from tandem.forecast.windows_check import Finding, check_windows

# Less than PCIe 3 with 16 PCIe lanes, which gives about 12 GB/s.
_SLOW_LINK_GIGABYTES = 10.0
_LITTLE_MEMORY_SHARE = 0.25
_SAMPLES = 5
_COPY_BYTES = 256 << 20
_SMI_FIELDS = "driver_version,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
_SMI_SECONDS = 20


class Driver(NamedTuple):
    """What nvidia-smi reports about one GPU; None for unknown values."""

    version: str | None = None
    pcie_generation: int | None = None
    """The highest generation that GPU and board support; an idle link runs slower to save power."""
    lanes: int | None = None
    most_lanes: int | None = None


def check_gpu(
    probe: Probe | None = None,
    open_streams: Callable[[], CudaStreams] = CudaStreams,
    ask_driver: Callable[[], Driver] | None = None,
    try_signals: Callable[[CudaStreams], Signals | None] = find_signals,
) -> Iterator[Finding]:
    """Yield findings about the GPU; tests simulate a GPU through the arguments."""
    try:
        gpu = require_cuda(probe)
    except CapacityError as error:
        yield _without_gpu(str(error))
        return
    streams = open_streams()
    driver = (ask_driver or _ask_about_first_gpu)()
    yield _memory(gpu, streams)
    if driver.version is not None:
        yield Finding("driver", "good", driver.version)
    yield _link(streams, driver)
    yield _hand_over(try_signals(streams))
    yield _locked_memory()
    yield from check_windows("GPU in WSL2")


def parse_smi(line: str) -> Driver:
    """Parse the line that nvidia-smi prints for `_SMI_FIELDS`.

    A number given as "[N/A]" becomes None. All values are None if the number of fields is wrong.
    """
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(Driver._fields):
        return Driver()
    numbers = [int(field) if field.isdigit() else None for field in fields[1:]]
    return Driver(fields[0], *numbers)


def _without_gpu(reason: str) -> Finding:
    """Return the finding without a usable GPU: "slow" if there is a driver, else "good"."""
    if shutil.which("nvidia-smi") is None:
        return Finding("GPU", "good", "none: every expert runs on the CPU")
    return Finding(
        "GPU", "slow", f"there is a driver, and no GPU that can be used: {reason}",
        "see https://pytorch.org/get-started for a torch that fits the driver",
    )  # fmt: skip


def _memory(gpu: Gpu, streams: CudaStreams) -> Finding:
    memory = streams.memory()
    major, minor = gpu.capability
    text = (
        f"{gpu.name} (compute {major}.{minor}), {format_bytes(memory.free_bytes)} free of "
        f"{format_bytes(memory.total_bytes)}, torch for CUDA {torch.version.cuda}"
    )
    if memory.free_bytes < _LITTLE_MEMORY_SHARE * memory.total_bytes:
        return Finding("GPU", "slow", text, "end other programs on the GPU (nvidia-smi lists them)")
    if not gpu.has_bf16:
        return Finding("GPU", "slow", text, "it has no bf16: load models with dtype='float16'")
    return Finding("GPU", "good", text)


def _link(streams: CudaStreams, driver: Driver) -> Finding:
    """Return a finding about the link, from timed copies of pinned memory to the GPU."""
    try:
        host, device = streams.pinned(_COPY_BYTES), streams.empty(_COPY_BYTES)
    except (OutOfDeviceMemoryError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        return Finding(
            "link", "slow", f"not measured: {first_line}", "free memory of the GPU and of the host"
        )

    def copy() -> None:
        device.copy_(host, non_blocking=True)

    seconds = [streams.seconds(Stream.FETCH, copy) for _ in range(_SAMPLES)]
    rate = _COPY_BYTES / min(seconds) / 1e9
    text = f"{rate:.1f} GB/s to the GPU{_lanes(driver)}"
    if driver.lanes and driver.most_lanes and driver.lanes < driver.most_lanes:
        return Finding(
            "link", "slow", text,
            f"the card could use {driver.most_lanes} lanes: put it into the slot nearest the "
            "processor",
        )  # fmt: skip
    if rate < _SLOW_LINK_GIGABYTES:
        return Finding(
            "link", "slow", text,
            "a slot with fewer lanes, or PCIe 3: put the card into the slot nearest the processor",
        )  # fmt: skip
    return Finding("link", "good", text)


def _hand_over(signals: Signals | None) -> Finding:
    if signals is None:
        return Finding(
            "decode steps", "slow", "a break at the experts of each layer: GPU and host cannot "
            "signal each other in a graph",
            "update the NVIDIA driver; Triton and a C compiler must be there too",
        )  # fmt: skip
    return Finding("decode steps", "good", f"one graph each, by {signals.name}")


def _lanes(driver: Driver) -> str:
    if driver.lanes is None:
        return ""
    generation = "" if driver.pcie_generation is None else f" {driver.pcie_generation}"
    return f", PCIe{generation} with {driver.lanes} lanes"


def _locked_memory() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("pinned memory", "good", "no limit")
    return Finding(
        "pinned memory", "good", f"limit {format_bytes(limit)}; a driver may pin beyond it"
    )


def _ask_about_first_gpu() -> Driver:
    """Return nvidia-smi's values for torch's first GPU; nvidia-smi may number it differently."""
    return ask_nvidia_smi(str(torch.cuda.get_device_properties(0).uuid))


def ask_nvidia_smi(uuid: str) -> Driver:
    """Return nvidia-smi's values for a GPU; all None if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Driver()
    words = [
        "-i",
        f"GPU-{uuid.removeprefix('GPU-')}",
        f"--query-gpu={_SMI_FIELDS}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return Driver()  # such as one half of a divided GPU
    return parse_smi(done.stdout.strip())
