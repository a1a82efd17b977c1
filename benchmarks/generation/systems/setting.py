"""What systems are asked, and what they answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is compared."""

    shape: str
    layers: int
    vocabulary: int
    threads: int
    prompt: int
    steps: int
    expert_dtype: str
    dense_dtype: str
    kv_dtype: str
    gguf: Path
    has_flash_attention: bool
    isa: str = ""
    """Tandem's instruction set; "" is the best of this processor."""
    may_repack: bool = True
    """Whether llama.cpp may keep weights in layouts of its own, which not always pay."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second at one depth; shares are of a ceiling measured beside it."""

    prefill: float
    decode: float
    decode_ceiling: float
    prefill_ceiling: float


class System(Protocol):
    """One system with its model in memory."""

    def measure(self, depth: int) -> Speeds:
        """Prefill a prompt behind `depth` tokens and decode some steps; ceilings 0 if not known."""
