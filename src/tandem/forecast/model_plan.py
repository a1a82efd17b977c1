"""Forecasts what loading a model here would do: bytes, slots, speed, and what would help.

Arithmetic on sizes and measured speeds; loads nothing.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tandem.core.units import format_bytes
from tandem.devices import kind_of
from tandem.experts.cache.sizing import DeviceMemory, count_slots, parse_gpu_memory
from tandem.forecast.cpu_forecast import ProfileForecast
from tandem.forecast.disk_forecast import DiskForecast, SlotsOverDisk
from tandem.forecast.gpu_forecast import GpuForecast
from tandem.forecast.sizes import ModelSizes
from tandem.forecast.speed_forecast import SpeedForecast
from tandem.forecast.state_bytes import checkpoint_bytes
from tandem.forecast.workspace import embedded_bytes, tower_bytes, workspace_bytes
from tandem.hf.whole_model import prompt_bytes, require_room
from tandem.kv_cache.latents import most_expanded_bytes

# Memory that the first forward adds: pages of torch's code, buffers and thread stacks. Measured on
# OLMoE and Qwen3-Next at an eighth of their width: 32 and 35 MB, of which 20 are code.
FORWARD_BYTES = 32 << 20
_CONTEXTS = (2048, 8192, 32768, 131072)


AnyForecast = SpeedForecast | GpuForecast | ProfileForecast


@dataclass(frozen=True, slots=True)
class Plan:
    """What loading and running a model with certain options would take: memory, slots and speed."""

    sizes: ModelSizes
    context_tokens: int
    process_bytes: int
    """Memory of the process without the model: Python, torch, Transformers."""
    available_bytes: int
    device: str
    gpu_bytes: dict[str, int]
    gpu_available_bytes: int
    """Free device memory before the model is loaded; 0 without a device."""
    expert_slots: int
    speed: AnyForecast | str
    """The speed: measured on this CPU, simulated, or from a profile; else why it is unknown."""
    can_be_packed: bool
    """Whether the model is not packed yet."""
    slots_over_disk: SlotsOverDisk | None = None
    """The host slots if experts run from the disk; None: all experts are in memory."""
    from_disk: DiskForecast | None = None
    """The speed with experts on the disk; None if `speed` is unknown or the disk not measured."""
    sequences: int = 1
    """The number of sequences, each as long as the context."""
    draft: ModelSizes | None = None
    """The sizes of a draft model on the CPU."""
    image_tokens: int = 0
    """Image tokens of one prompt."""

    @property
    def contexts(self) -> list[int]:
        """The context lengths for which the KV cache is reported, up to the model's longest."""
        longest = self.sizes.longest_context
        if longest is None:
            return list(_CONTEXTS)
        return [*(tokens for tokens in _CONTEXTS if tokens < longest), longest]

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the keys and values of all sequences, each `context_tokens` long."""
        return self.sequences * self.sizes.kv.bytes_of(self.context_tokens)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states (not keys and values) of all sequences."""
        return self.sequences * self.sizes.state_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Host bytes of the states' checkpoints with a full context, even with states on a GPU."""
        free = self.available_bytes - (self.load_bytes - self.process_bytes)
        each, tokens = self.sizes.state_bytes, self.context_tokens
        return checkpoint_bytes(each, tokens, self.sequences, free)

    @property
    def expanded_bytes(self) -> int:
        """Bytes of the keys and values to which a prompt's latents are expanded on the CPU.

        At least one layer stays expanded, more as free memory allows. 0 with dense parts on a GPU.
        """
        each, tokens = self.sizes.kv.expanded, self.context_tokens
        all_bytes = self.sequences * sum(each) * tokens
        if self.is_dense_on_gpu or not each:
            return 0
        free = self.available_bytes - (self.load_bytes - self.process_bytes) - self.kv_cache_bytes
        return min(all_bytes, max(most_expanded_bytes(free), max(each) * tokens))

    @property
    def workspace_bytes(self) -> int:
        """The most bytes of a prompt's activations: the model's, its vision tower's and a draft's.

        malloc still holds half of the tower's memory when the layers begin, and the model's when
        the draft model reads the prompt.
        """
        num_tokens = self.sequences * self.context_tokens
        is_measured = self.device != "cpu"
        prompts = workspace_bytes(self.sizes, num_tokens, is_measured=is_measured)
        if self.image_tokens:
            prompts += embedded_bytes(self.sizes.config, num_tokens)
        tower = tower_bytes(self.sizes.vision, self.image_tokens)
        draft = 0 if self.draft is None else workspace_bytes(self.draft, num_tokens)
        return max(tower, prompts + tower // 2) + draft

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model, with KV cache and states of all sequences; 0 without one."""
        if (draft := self.draft) is None:
            return 0
        each = draft.kv.bytes_of(self.context_tokens) + draft.state_bytes
        return draft.total_bytes + self.sequences * each

    @property
    def experts_bytes(self) -> int:
        """Bytes of the experts in memory: of all, or of the host slots if an option sets them."""
        over = self.slots_over_disk
        return over.num_bytes if over is not None and over.is_given else self.sizes.experts_bytes

    @property
    def load_bytes(self) -> int:
        """Host memory after loading, before a prompt."""
        here = self.process_bytes + self.experts_bytes
        sizes = self.sizes
        return here + (sizes.host_bytes if self.is_dense_on_gpu else sizes.total_dense_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory with a full context."""
        held = self.load_bytes + self.checkpoint_bytes + self.workspace_bytes + self.expanded_bytes
        held += self.draft_bytes + FORWARD_BYTES
        if not self.is_dense_on_gpu:
            held += self.kv_cache_bytes + self.state_bytes
        return held

    @property
    def is_dense_on_gpu(self) -> bool:
        """Whether attention, KV cache and dense parts are on the device; false if emulated."""
        return kind_of(self.device).holds_dense_parts

    @property
    def needed_bytes(self) -> int:
        """Host memory needed beyond what this planning process has already taken."""
        return self.host_bytes - self.process_bytes

    @property
    def fits(self) -> bool:
        """Whether the free host memory suffices."""
        return self.needed_bytes <= self.available_bytes


def plan_slots(
    sizes: ModelSizes,
    *,
    device: str,
    gpu_memory: str,
    memory: DeviceMemory,
    context_tokens: int,
    sequences: int = 1,
    others: Mapping[str, ModelSizes] = MappingProxyType({}),
) -> tuple[int, dict[str, int]]:
    """Return the number of slots, and the use of the device's memory by part.

    Raises `CapacityError` if the device's memory is too small. A dense model has no slots: if it
    does not fit as a whole, the error names the formats in `others` (its sizes by format) that
    would fit.
    """
    parts = {"dense": 0, "kv_cache": 0, "experts": 0, "workspace": 0}
    if device == "cpu":
        return 0, parts
    if kind_of(device).holds_dense_parts:
        parts |= {
            "dense": sizes.device_bytes,
            "kv_cache": sequences
            * (sizes.device_kv.device_bytes_of(context_tokens) + sizes.state_bytes),
            "workspace": prompt_bytes(sizes.config, sequences * context_tokens, sizes.top_k),
        }
    if sizes.is_dense:
        smaller = {f"--dense-dtype {name}": x.device_bytes for name, x in others.items()}
        require_room(gpu_memory, memory, parts, smaller)
        return 0, parts
    slots = count_slots(
        parse_gpu_memory(gpu_memory),
        memory,
        slot_bytes=sizes.expert_image_bytes,
        num_experts=sizes.num_experts,
        reserved_bytes=sum(parts.values()),
    )
    return slots, parts | {"experts": slots * sizes.expert_image_bytes}


def advice(plan: Plan, others: dict[str, ModelSizes]) -> list[str]:
    """Return advice on making a model fit or run faster; `others` has its sizes by format."""
    lines = []
    if not plan.fits:
        lines += _to_fit(plan, others)
    if plan.can_be_packed and plan.fits:
        lines.append(
            "pack it once (tandem pack) and it loads at the disk's speed, without the original"
        )
    here = plan.sizes.layers_bytes
    for name, sizes in others.items():
        ratio = sizes.layers_bytes / here
        if plan.fits and ratio < 0.7:
            faster = ""
            if isinstance(plan.speed, SpeedForecast):
                faster = f", up to {_decode_with(plan.speed, plan.sizes, sizes):.1f} tok/s"
            lines.append(
                f"with {_packed_in(name, sizes)}: {format_bytes(sizes.layers_bytes)} instead of "
                f"{format_bytes(here)}{faster} (answers change a little)"
            )
    lines += _rounded_dense_layers(plan.sizes)
    if plan.device != "cpu" and plan.expert_slots < plan.sizes.num_experts:
        share = plan.expert_slots / plan.sizes.num_experts
        lines.append(
            f"{share:.0%} of the experts stay on the device; more of its memory (--gpu-memory) or "
            "a smaller context means more hits"
        )
    return lines


def _packed_in(name: str, sizes: ModelSizes) -> str:
    """Name a format in advice: "--dense-dtype int8" for a dense model, else "int8 experts"."""
    return f"--dense-dtype {name}" if sizes.is_dense else f"{name} experts"


def _rounded_dense_layers(sizes: ModelSizes) -> list[str]:
    """Return advice on quantised linear layers that lose the checkpoint's codes; [] if none do."""
    kept, others = sizes.dense_layers_with_codes, sizes.dense_layers_without
    if not others:
        return []
    if not kept:
        return [
            f"the {others} linear layers that the checkpoint has quantised are dequantised; codes "
            "are kept with --dense-dtype auto, where a packed format holds them"
        ]
    return [
        f"{kept} linear layers keep the checkpoint's codes; {others} that no packed format holds "
        "are dequantised and rounded again"
    ]


def _to_fit(plan: Plan, others: dict[str, ModelSizes]) -> list[str]:
    missing = plan.needed_bytes - plan.available_bytes
    lines = [f"{format_bytes(missing)} of memory are missing"]
    for name, sizes in others.items():
        smaller = dataclasses.replace(plan, sizes=sizes)
        if smaller.fits:
            lines.append(
                f"with {_packed_in(name, sizes)} it fits: {format_bytes(smaller.needed_bytes)} of "
                f"{format_bytes(plan.available_bytes)}"
            )
            break
    room = plan.available_bytes - (plan.needed_bytes - plan.kv_cache_bytes)
    tokens = room // max(1, plan.sequences * plan.sizes.kv.token_bytes)
    if tokens >= 512:
        lines.append(f"with --context {tokens // 256 * 256} it fits as it is")
    return lines


def _decode_with(speed: SpeedForecast, before: ModelSizes, after: ModelSizes) -> float:
    """Return the decode speed with sizes `after`, if time is proportional to the bytes read."""
    now, then = (
        sizes.top_k * sizes.num_moe_layers * sizes.expert_image_bytes + sizes.total_dense_bytes
        for sizes in (before, after)
    )
    return speed.decode_tokens_per_second * now / then


def as_json(plan: Plan, lines: list[str]) -> dict[str, object]:
    """Return the plan, with `lines` as its advice, as JSON; names end with their units."""
    speed = plan.speed
    known = None if isinstance(speed, str) else speed
    return {
        "fits": plan.fits,
        "host_bytes": plan.host_bytes,
        "load_host_bytes": plan.load_bytes,
        "host_available_bytes": plan.available_bytes + plan.process_bytes,
        "gpu_bytes": plan.gpu_bytes,
        "gpu_available_bytes": plan.gpu_available_bytes,
        "expert_slots": plan.expert_slots,
        "experts": plan.sizes.num_experts,
        "dense_layers": {
            "with_codes": plan.sizes.dense_layers_with_codes,
            "dequantised": plan.sizes.dense_layers_without,
        },
        "expert_formats": list(plan.sizes.expert_formats),
        "parts_bytes": {"experts": plan.sizes.experts_bytes, **plan.sizes.dense_bytes},
        "disk_table_bytes": plan.sizes.disk_table_bytes,
        "kv_cache_bytes": plan.kv_cache_bytes,
        "kv_cache_bytes_by_context": {
            str(tokens): plan.sizes.kv.bytes_of(tokens) for tokens in plan.contexts
        },
        "state_bytes": plan.state_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "expanded_bytes": plan.expanded_bytes,
        "context_tokens": plan.context_tokens,
        "sequences": plan.sequences,
        "draft_bytes": plan.draft_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "time_to_first_token_seconds": known and known.prefill_seconds,
        "prefill_tokens_per_second": known and known.prefill_tokens_per_second,
        "decode_tokens_per_second": known and known.decode_tokens_per_second,
        **_more_of_speed(speed),
        "from_disk": plan.slots_over_disk and _disk_json(plan.slots_over_disk, plan.from_disk),
        "advice": lines,
    }


def _disk_json(slots: SlotsOverDisk, found: DiskForecast | None) -> dict[str, object]:
    memory: dict[str, object] = {
        "resident_share": slots.share, "slots": slots.num_slots, "memory_bytes": slots.num_bytes,
    }  # fmt: skip
    if found is None:
        return memory
    return {
        **memory,
        "hit_rate": found.hit_rate,
        "reads": found.disk.reads,
        "disk_bytes_per_second": found.disk.most_bytes_per_second,
        "time_to_first_token_seconds": found.prefill_seconds,
        "prefill_tokens_per_second": found.prompt_tokens / found.prefill_seconds,
        "decode_tokens_per_second": 1 / found.decode_seconds,
    }


def _more_of_speed(speed: AnyForecast | str) -> dict[str, object]:
    """Return the JSON fields that only `speed`'s class has; `speed_unknown` if it is a text."""
    if isinstance(speed, str):
        return {"speed_unknown": speed}
    if isinstance(speed, GpuForecast):
        return {
            "profile": speed.profile, "hit_rate": speed.hit_rate, "host_path": speed.host_path,
            "assignment": speed.assignment, "decode_rules": speed.rules,
        }  # fmt: skip
    if isinstance(speed, ProfileForecast):
        return {"profile": speed.profile, "costs_of": speed.costs_of}
    return {
        "first_time_to_first_token_seconds": speed.first_prefill_seconds,
        "first_tokens_per_second": speed.first_tokens_per_second,
    }
