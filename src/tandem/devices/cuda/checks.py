"""Whether this machine has a GPU that Tandem can use, and what to do if not: one clear sentence."""

from typing import NamedTuple, Protocol

import torch

from tandem.core.errors import CapacityError, UnsupportedModelError

# Below, bf16 arithmetic is missing, and Triton (as of 3.6) leaves the matrix units alone.
BF16_CAPABILITY = TRITON_MATRIX_CAPABILITY = (8, 0)
TRITON_ATTENTION_CAPABILITY = (7, 5)  # its kernels are compiled for these in the tests
OLDEST_CAPABILITY = (7, 0)


class Gpu(NamedTuple):
    """A GPU as far as it decides what can run."""

    name: str
    capability: tuple[int, int]
    total_bytes: int

    @property
    def has_bf16(self) -> bool:
        """Tell whether bf16 is arithmetic of its own here, not imitated."""
        return self.capability >= BF16_CAPABILITY


class Probe(Protocol):
    """Asks torch and the driver."""

    def built_for_cuda(self) -> bool:
        """Tell whether this torch has CUDA at all."""

    def count(self) -> int:
        """Return how many GPUs there are; raises `RuntimeError` in the driver's words."""

    def gpu(self, index: int) -> Gpu:
        """Describe one."""


class TorchProbe:
    """The real thing."""

    def built_for_cuda(self) -> bool:
        """Ask torch's build."""
        return torch.version.cuda is not None

    def count(self) -> int:
        """Ask the driver, by starting CUDA."""
        torch.cuda.init()
        return torch.cuda.device_count()

    def gpu(self, index: int) -> Gpu:
        """Ask the driver."""
        found = torch.cuda.get_device_properties(index)
        return Gpu(found.name, (found.major, found.minor), found.total_memory)


def require_cuda(probe: Probe | None = None, index: int = 0) -> Gpu:
    """Return the GPU, or raise `CapacityError` that says what is missing."""
    probe = probe or TorchProbe()
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
    if gpu.capability < OLDEST_CAPABILITY:
        raise CapacityError(
            f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}, and "
            f"Tandem needs {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer; {otherwise[3:]}"
        )
    return gpu


def require_dtype(gpu: Gpu, dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` for a model in bf16 on a GPU that has no bf16."""
    if dtype == torch.bfloat16 and not gpu.has_bf16:
        raise UnsupportedModelError(
            f"the model is bf16 and {gpu.name} has no bf16 arithmetic; load it with dtype='float16'"
        )
