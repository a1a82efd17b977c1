"""Checks that Tandem can use a GPU; each error says in one sentence what the user can do."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem.core.errors import CapacityError, UnsupportedModelError

# Older GPUs lack bf16 arithmetic, and Triton (as of 3.6) does not use their matrix units.
BF16_CAPABILITY = TRITON_MATRIX_CAPABILITY = (8, 0)
TRITON_ATTENTION_CAPABILITY = (7, 5)  # the oldest for which tests compile its kernels
OLDEST_CAPABILITY = (7, 0)


class Gpu(NamedTuple):
    """The properties of a GPU that decide what can run."""

    name: str
    capability: tuple[int, int]
    total_bytes: int

    @property
    def has_bf16(self) -> bool:
        """Whether the GPU computes bf16 natively, not by emulation."""
        return self.capability >= BF16_CAPABILITY


class Probe:
    """Queries torch and the driver about GPUs."""

    def built_for_cuda(self) -> bool:
        """Tell whether this torch was built with CUDA."""
        return torch.version.cuda is not None

    def count(self) -> int:
        """Return the number of GPUs; raises `RuntimeError` with the driver's message."""
        torch.cuda.init()
        return torch.cuda.device_count()

    def gpu(self, index: int) -> Gpu:
        """Return the properties of one GPU."""
        found = torch.cuda.get_device_properties(index)
        return Gpu(found.name, (found.major, found.minor), found.total_memory)

    def built_for(self) -> Sequence[str]:
        """Return the architectures of torch's kernels, such as "sm_90" and "compute_120"."""
        return torch.cuda.get_arch_list()


def require_cuda(probe: Probe | None = None, index: int = 0) -> Gpu:
    """Return a GPU's properties; raises `CapacityError` if Tandem cannot use the GPU."""
    probe = probe or Probe()
    otherwise = "or run with device cpu"
    if not probe.built_for_cuda():
        raise CapacityError(
            "device is cuda, but this torch is a build without CUDA; install one with it "
            f"(pip install torch), {otherwise}"
        )
    try:
        count = probe.count()
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0].strip()
        if "too old" in first_line or "insufficient" in first_line:
            raise CapacityError(
                f"the NVIDIA driver is older than what this torch was built for ({first_line}); "
                f"update the driver, install a torch for it, {otherwise}"
            ) from error
        raise CapacityError(
            f"CUDA cannot be started ({first_line}); check that nvidia-smi shows a GPU, {otherwise}"
        ) from error
    if index >= count:
        raise CapacityError(
            f"device is GPU {index}, and this machine has {count}; check CUDA_VISIBLE_DEVICES, "
            f"{otherwise}"
        )
    gpu = probe.gpu(index)
    has = f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.capability < OLDEST_CAPABILITY:
        raise CapacityError(
            f"{has}, and Tandem needs {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer; "
            f"{otherwise[3:]}"
        )
    built_for = probe.built_for()
    if built_for and not any(_runs_on(gpu.capability, name) for name in built_for):
        raise CapacityError(
            f"{has}, and this torch has kernels only for {', '.join(built_for)}; install a build "
            f"of torch for older GPUs, {otherwise}"
        )
    return gpu


def _runs_on(capability: tuple[int, int], built_for: str) -> bool:
    """Tell whether a GPU can run code built for `built_for`, such as "sm_86" or "compute_120"."""
    kind, _, number = built_for.partition("_")
    digits = number.rstrip("af")
    if not digits.isdigit():
        return False
    built = int(digits[:-1]), int(digits[-1])
    if number != digits:  # code for one generation, without later ones
        return kind == "sm" and capability == built
    if kind == "compute":
        return capability >= built
    return capability[0] == built[0] and capability >= built


def require_dtype(gpu: Gpu, dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` for a bf16 model on a GPU without bf16."""
    if dtype == torch.bfloat16 and not gpu.has_bf16:
        raise UnsupportedModelError(
            f"the model is bf16 and {gpu.name} has no bf16 arithmetic; load it with dtype='float16'"
        )
