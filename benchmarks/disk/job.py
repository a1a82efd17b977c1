"""A job for one process of the benchmark."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One system under one limit, in a process of its own."""

    system: str
    """"slots", "own-slots", "mapped", "fit" (both in memory), "llama.cpp", or "rival"."""
    folder: Path
    """The packed model."""
    num_layers: int
    moe_layers: int
    num_experts: int
    top_k: int
    routing: str = "own"
    """A routing of `benchmarks.disk.routing`, or "own": the choice of the random weights."""
    steps: int
    warm_up: int
    prompt: int
    cold_prompt: int
    dense_dtype: str
    eviction: str
    threads: int
    fit_layers: int = 0
    expert_memory: str = "auto"
    """As in `OffloadConfig`; for `slots` and `own-slots`."""
    look_ahead: float | None = None
    """The accuracy of scripted predictions of the next layer's experts; None: no predictions."""
    gguf: Path | None = None
    command: list[str] = field(default_factory=list)
    """The rival's command."""
