"""The input and the results of a compared system."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One file and one workload, the same for every system."""

    gguf: Path
    threads: int
    prompt: int
    """Prompt tokens of one prefill."""
    steps: int
    """Tokens decoded after the prompt."""
    kv_dtype: str = "auto"
    has_flash_attention: bool = False
    """llama.cpp's flash attention; slower on CPUs."""
    isa: str = ""
    """Tandem's instruction set; "" selects this processor's best instruction set."""
    may_repack: bool = True
    """Whether llama.cpp may repack weights into its own layouts, which is not always faster."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second at one depth, and the ceilings measured together with them."""

    prefill: float
    decode: float
    decode_ceiling: float
    prefill_ceiling: float


class Choice(NamedTuple):
    """The token that a model would choose after a prefix of the text."""

    token: int
    margin: float
    """The best logit minus the second best."""


class System(Protocol):
    """One compared system, with its model in memory."""

    def measure(self, depth: int) -> Speeds:
        """Time a prompt after `depth` tokens, and decode steps after it; unknown ceilings are 0."""


class Chooser(System, Protocol):
    """A system that can also report its first choices."""

    def choices(self, ids: Sequence[int]) -> list[Choice]:
        """Return, for each token of a text, the token that the model would choose next."""
