"""The compared systems, with the same shape or file."""

from benchmarks.generation.systems.setting import ShapeSetting
from benchmarks.generation.systems.tandem_model import PackedTandem
from benchmarks.generation.systems.torch_model import TorchModel

from tandem.bench.peers.llama_cpp import LlamaCpp
from tandem.bench.peers.tandem_model import Tandem
from tandem.bench.peers.turns import Maker

SYSTEMS: dict[str, Maker] = {
    "tandem": Tandem,
    "packed": PackedTandem,
    "llama.cpp": LlamaCpp,
    "torch": TorchModel,
}

__all__ = ["SYSTEMS", "ShapeSetting"]
