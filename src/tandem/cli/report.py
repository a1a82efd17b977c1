"""A summary of a run: a few lines of text, and one JSON object for scripts."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tandem.core.units import format_bytes
from tandem.experts.cache.host_slots import SlotStatistics
from tandem.experts.store.host_memory import peak_process_bytes, process_bytes
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.experts.tracing.events import ExpertStatistics
from tandem.foreign_types import PreTrainedModel

if TYPE_CHECKING:
    from tandem.generate.answer import Answer
    from tandem.generate.speculation.speculation import Speculation


# How an answer ended -> why it is cut off.
_CUT = {
    "length": "it has {tokens} tokens, as many as --max-new-tokens allows (in a chat: /set "
    "max_new_tokens)",
    "context": "the model's context of {context} tokens is full",
    "interrupted": "Ctrl-C stopped it",
}


class RunReport:
    """Collects the events of a model's executor until `close`, and reports them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Start counting the events of a model that Tandem loaded."""
        from tandem.generate.next_token_models import context_tokens
        from tandem.hf.runtime import require_runtime

        self._context_tokens = context_tokens(model)
        runtime = require_runtime(model)
        self._executor, self._host_slots = runtime.executor, runtime.host_slots
        self._disk_before = self._disk_now()
        self._expert_cache = self._executor.cache
        self._device = model.device
        self._experts = ExpertStatistics()
        self._cache = CacheStatistics()
        self._executor.listeners += [self._experts, self._cache]
        if self._expert_cache is not None:
            self._expert_cache.clock.watchers += 1
        self._seconds_before = self._seconds()
        self._speculation: Speculation | None = None
        self._saved_before = 0

    def count_drafts(self, speculation: "Speculation | None") -> None:
        """Start counting the bytes of expert weights that drafts save."""
        self._speculation = speculation
        if speculation is not None:
            speculation.experts = self._experts
            self._saved_before = speculation.counts.saved_bytes

    def close(self) -> None:
        """Stop counting."""
        if self._speculation is not None:
            self._speculation.experts = None
        self._executor.catch_up()
        self._executor.listeners.remove(self._experts)
        self._executor.listeners.remove(self._cache)
        if self._expert_cache is not None:
            self._expert_cache.clock.watchers -= 1

    def line(self, answer: "Answer") -> str:
        """Return the statistics as text: lines on speed, expert cache, disk, and a cut answer."""
        self._executor.catch_up()
        parts = [
            f"first token {answer.time_to_first_token_seconds:.2f} s",
            f"prefill {answer.prefill_tokens_per_second:.1f} tok/s ({_prompt_parts(answer)})",
            f"decode {answer.decode_tokens_per_second:.1f} tok/s ({len(answer.token_ids)} tokens)",
            *self._read_parts(),
            f"memory {format_bytes(process_bytes())}",
        ]
        if self._context_tokens is not None:
            share = _used_tokens(answer) / self._context_tokens
            parts.append(f"context {share:.0%} of {self._context_tokens} tokens")
        if answer.drafted_tokens:
            saved = f", {format_bytes(self._saved_bytes)} not read" if self._saved_bytes > 0 else ""
            parts.append(f"drafted {answer.drafted_tokens}, kept {answer.accepted_tokens}{saved}")
        lines = ["[" + " | ".join(parts) + "]"]
        if self._expert_cache is not None:
            lines.append("[" + " | ".join(self._cache_parts()) + "]")
        if self._host_slots is not None:
            lines.append("[" + " | ".join(self._disk_parts()) + "]")
        if why := _CUT.get(self._end(answer)):
            reason = why.format(tokens=len(answer.token_ids), context=self._context_tokens)
            lines.append(f"[the answer is cut off: {reason}]")
        return "\n".join(lines)

    def _read_parts(self) -> list[str]:
        """Return a text on the bytes of experts' weights that were read; [] for a dense model."""
        has_experts = len(self._executor.store) > 0
        return [f"experts read {format_bytes(self._experts.touched_bytes)}"] * has_experts

    def _end(self, answer: "Answer") -> str:
        """Return why an answer ended: a `FinishReason`, or "context" if the context is full."""
        longest = self._context_tokens
        is_full = longest is not None and _used_tokens(answer) >= longest
        return "context" if answer.finish_reason == "length" and is_full else answer.finish_reason

    def _cache_parts(self) -> list[str]:
        """Return texts about the expert cache."""
        cache, busy = self._cache, self._busy()
        useful = f", {cache.prefetch_useful} useful" if cache.prefetch_issued else ""
        return [
            f"{self._device_name} {self._num_slots} slots",
            f"hits {cache.hit_rate:.0%} ({cache.hits} of {cache.active})",
            f"copies {cache.copies} ({format_bytes(self._copied_bytes())})",
            f"ahead {cache.prefetch_issued}{useful}",
            f"device {cache.device_share:.0%} of the routed tokens",
            f"busy: cpu {busy['cpu']:.0%}, device {busy['gpu']:.0%}, link {busy['link']:.0%}",
        ]

    def _disk_now(self) -> SlotStatistics:
        return self._host_slots.statistics() if self._host_slots else SlotStatistics()

    def _disk_parts(self) -> list[str]:
        """Return texts about disk reads."""
        disk = self._disk_now().since(self._disk_before)
        assert self._host_slots is not None
        for_device = disk.device_hits + disk.device_misses
        return [
            f"memory holds {self._host_slots.share:.0%} of the experts",
            f"hits {disk.hit_rate:.0%} ({disk.hits} of {disk.hits + disk.misses})",
            *([f"for the device {disk.device_hits} of {for_device}"] if for_device else []),
            *(
                [f"ahead {disk.likely_reads}, {disk.likely_used} useful"]
                if disk.likely_reads
                else []
            ),
            f"disk {format_bytes(disk.read_bytes)}, waited {disk.waited_seconds:.1f} s",
        ]

    @property
    def _saved_bytes(self) -> int:
        """Bytes of weights not read because drafted tokens shared experts; may be negative."""
        if self._speculation is None:
            return 0
        return self._speculation.counts.saved_bytes - self._saved_before

    def _copied_bytes(self) -> int:
        return self._cache.copies * self._expert_cache.slot_bytes if self._expert_cache else 0

    @property
    def _num_slots(self) -> int:
        return self._expert_cache.num_slots if self._expert_cache else 0

    def _seconds(self) -> tuple[float, float, float, float]:
        """Return the time of the planner's clock, and the busy seconds of CPU, device and link."""
        if self._expert_cache is None:
            return (0.0, 0.0, 0.0, 0.0)
        clock = self._expert_cache.clock
        return clock.now, clock.cpu_busy, clock.gpu_busy, clock.link_busy

    def _busy(self) -> dict[str, float]:
        """Return the busy shares of CPU, GPU and link in the time since this report began."""
        passed, *worked = (
            now - before for now, before in zip(self._seconds(), self._seconds_before, strict=True)
        )
        shares = [min(1.0, each / passed) if passed else 0.0 for each in worked]
        return dict(zip(("cpu", "gpu", "link"), shares, strict=True))

    @property
    def _device_name(self) -> str:
        return self._expert_cache.device.name if self._expert_cache else str(self._device)

    def json(self, answer: "Answer") -> dict[str, object]:
        """Return the statistics as JSON; names end with their units."""
        cache = self._cache
        misses = self._experts.active_experts - cache.hits  # without slots, all of them are misses
        return {
            "text": answer.text,
            "prompt_tokens": answer.prompt_tokens,
            "kept_prompt_tokens": answer.reused_tokens,
            "generated_tokens": len(answer.token_ids),
            "time_to_first_token_seconds": answer.time_to_first_token_seconds,
            "prefill_tokens_per_second": answer.prefill_tokens_per_second,
            "decode_tokens_per_second": answer.decode_tokens_per_second,
            "speculation": {
                "drafted": answer.drafted_tokens,
                "accepted": answer.accepted_tokens,
                "tokens_per_step": _tokens_per_step(answer),
                "saved_expert_bytes": self._saved_bytes,
            },
            "finish_reason": self._end(answer),
            "device": self._device_name,
            "expert_cache": {
                "slots": self._num_slots,
                "hits": cache.hits,
                "misses": misses,
                "hit_rate": cache.hit_rate,
                "copies": cache.copies,
                "fetched_bytes": self._copied_bytes(),
            },
            "expert_memory": self._disk_json(),
            "prefetch": {"issued": cache.prefetch_issued, "useful": cache.prefetch_useful},
            "device_share_of_rows": cache.device_share,
            "busy": self._busy(),
            "seconds_on_the_planners_clock": self._seconds()[0] - self._seconds_before[0],
            "plan_microseconds": cache.plan_seconds / max(1, cache.calls) * 1e6,
            "experts_read_bytes": self._experts.touched_bytes,
            "experts_stored_bytes": self._executor.store.num_bytes,
            "memory_bytes": {
                "host": process_bytes(), "gpu": self._gpu_bytes(torch.cuda.memory_allocated),
            },
            # Peaks. The host's includes pages of files that were read during loading.
            "peak_memory_bytes": {
                "host": peak_process_bytes(),
                "gpu": self._gpu_bytes(torch.cuda.max_memory_allocated),
            },
        }  # fmt: skip

    def _disk_json(self) -> dict[str, object] | None:
        """Return the host slots' counts as JSON; None if the model has no host slots."""
        if self._host_slots is None:
            return None
        disk = self._disk_now().since(self._disk_before)
        slots = {"bytes": self._host_slots.num_bytes, "share": self._host_slots.share}
        return slots | dataclasses.asdict(disk) | {"hit_rate": disk.hit_rate}

    def _gpu_bytes(self, count: Callable[[torch.device], int]) -> int:
        return count(self._device) if self._device.type == "cuda" else 0


def _used_tokens(answer: "Answer") -> int:
    """Return the number of tokens in the context after an answer: its prompt's and its own."""
    return answer.prompt_tokens + len(answer.token_ids)


def _prompt_parts(answer: "Answer") -> str:
    """Return a text with the numbers of computed and of reused prompt tokens."""
    new, kept = answer.prompt_tokens - answer.reused_tokens, answer.reused_tokens
    return f"{new} new, {kept} kept" if kept else f"{new} tokens"


def _tokens_per_step(answer: "Answer") -> float | None:
    """Return the mean number of tokens per decode step; None without any step."""
    decoded = len(answer.token_ids) - 1  # the prompt's step gives the first token
    num_steps = decoded - answer.accepted_tokens
    return decoded / num_steps if num_steps > 0 else None
