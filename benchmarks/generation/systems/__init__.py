"""The systems that are compared, with the same shape or file."""

from collections.abc import Callable

from benchmarks.generation.systems.llama_cpp import LlamaCpp
from benchmarks.generation.systems.setting import Setting, Speeds, System
from benchmarks.generation.systems.tandem_model import PackedTandem, Tandem
from benchmarks.generation.systems.torch_model import TorchModel

SYSTEMS: dict[str, Callable[[Setting], System]] = {
    "tandem": Tandem,
    "packed": PackedTandem,
    "llama.cpp": LlamaCpp,
    "torch": TorchModel,
}

__all__ = ["SYSTEMS", "LlamaCpp", "Setting", "Speeds", "System"]
