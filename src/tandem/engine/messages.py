"""The messages between the HTTP process and the engine process, pickled, over one pipe.

The engine process sends `Ready` first. It answers a `Submit` with any number of `Progressed` that
name the request, and with one `Failed` if the request fails. After a request's finish reason,
failure or `Cancel` it sends nothing more for that request; the HTTP process must drop messages for
a cancelled request that are already in the pipe.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict

from tandem.core.config import option
from tandem.foreign_types import PreTrainedModel, Tokenizer
from tandem.generate.kept_prefixes import KeptPrefixes
from tandem.generate.request import Request
from tandem.generate.token_output import BatchCounts, TokenOutput

# Loads (model, tokenizer); pickled by name, so that the engine process can call it.
ModelLoader = Callable[[], tuple[PreTrainedModel, Tokenizer]]
# The exit code if the model cannot be loaded; trying again would not help.
EXIT_CANNOT_LOAD = 3
# The exit code if the GPU hangs or is broken; another process can use it.
EXIT_DEVICE_LOST = 4


class DraftSources(TypedDict, total=False):
    """The arguments of `Generator` that choose a drafter."""

    draft: PreTrainedModel
    mtp_from: Path


def no_drafting(tokenizer: Tokenizer) -> DraftSources:
    """Return no draft sources: the model drafts by prompt look-up or its own MTP layer, if any."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of the engine process."""

    max_running: int
    part_tokens: int
    has_replay: bool = True
    speculate: str = "auto"
    load_drafting: Callable[[Tokenizer], DraftSources] = no_drafting
    """Returns the draft sources for a model with this tokenizer; pickled by name."""
    max_gap: float | None = None
    """The longest pause of a stream of tokens while prompts are computed, in seconds; None: the
    time of one full prefill chunk."""
    is_isolated: bool = False
    """Whether requests have owners, so that drafts must not use answers to other requests."""
    kept_prefixes: KeptPrefixes | None = None
    """The directory for prompt prefixes, and its limit; None: prefixes are not kept on disk."""


class Submit(NamedTuple):
    """Asks the engine process to answer a request."""

    request: Request
    images: bytes | None = None
    """The request's `ImagePrompt`, pickled, because the HTTP side that forwards it has no torch."""


class Cancel(NamedTuple):
    """Asks the engine process to drop a request."""

    request_id: int


class Watch(NamedTuple):
    """Asks the engine process to start or stop sending `Live` snapshots."""

    is_on: bool


class Stop(NamedTuple):
    """Asks the engine process to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the HTTP side needs to know about the model."""

    model_type: str
    vocabulary: int
    end_ids: tuple[int, ...]
    """Tokens that end an answer."""
    context: int | None
    max_running: int
    """The most requests that the model runs at a time."""
    num_layers: int
    """The number of MoE layers."""
    num_experts: int
    device: str
    why_padded: str | None
    """The reason why requests run one after another; None: they run together."""
    why_no_images: str | None
    """The reason why requests with images are refused; None: the model takes images."""


class Ready(NamedTuple):
    """Says that the model is loaded."""

    info: ModelInfo


class Progressed(NamedTuple):
    """Reports the token outputs of one step."""

    token_outputs: list[TokenOutput]


class Failed(NamedTuple):
    """Says that requests have failed; `message` is a sentence for clients."""

    request_ids: list[int]
    message: str
    is_theirs: bool = False
    """Whether the requests themselves caused the failure."""


class Alive(NamedTuple):
    """Says that a long step is still running; sent about once a second."""


@dataclass(slots=True, kw_only=True)
class EngineStatistics:
    """Totals since the engine process started; fields with a help text are counters of /metrics."""

    batch: BatchCounts = field(default_factory=BatchCounts)
    drafting_steps: int = option(0, help="decode steps that verified drafted tokens")
    unpaid_draft_steps: int = option(
        0, help="decode steps for which drafts were not worth verifying"
    )
    active_experts: int = option(0, help="experts that a layer and step needed")
    hits: int = option(0, help="of them, resident and ready")
    fetched_bytes: int = option(0, help="bytes of experts copied to the device")
    prefetch_issued: int = option(0, help="experts prefetched")
    prefetch_useful: int = option(0, help="of them, used by their layer's next step")
    rows_on_device: int = option(0, help="(token, expert) rows that the device computed")
    rows_on_cpu: int = option(0, help="(token, expert) rows that the CPU computed")
    expert_bytes_read: int = option(0, help="bytes of expert weights that were read")
    host_slot_hits: int = option(0, help="experts of a model on the disk that memory held")
    host_slot_misses: int = option(0, help="experts that were read from the disk when wanted")
    host_slot_device_hits: int = option(0, help="experts that memory held for a copy to the device")
    host_slot_device_misses: int = option(0, help="experts that were read for a copy to the device")
    host_slot_likely_reads: int = option(
        0, help="experts that were read because a router run ahead chose them"
    )
    host_slot_likely_used: int = option(0, help="of them, used by their layer")
    expert_disk_bytes: int = option(0, help="bytes of experts that were read from the disk")
    expert_disk_seconds: float = option(
        0.0, help="seconds for which steps waited for experts on the disk"
    )
    draft_saved_bytes: int = 0
    """Expert weights that drafting saved because drafted tokens shared experts, minus the weights
    that only rejected tokens used."""
    slots: int = 0
    disk_bytes: int = 0
    memory_bytes: dict[str, int] = field(default_factory=dict)


class Report(NamedTuple):
    """Reports the current statistics."""

    statistics: EngineStatistics


class Live(NamedTuple):
    """A snapshot for the server's page, as JSON text."""

    snapshot: str
