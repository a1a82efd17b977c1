"""What a run did, as one line for people and one JSON object for scripts."""

import json
import resource
import sys
from typing import TYPE_CHECKING, Any

import torch

from tandem.core.units import format_bytes
from tandem.offload.events import ExpertStatistics

if TYPE_CHECKING:
    from tandem.generate.stream import Answer

_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


class RunReport:
    """Listens to a model's executor from its creation to `close`."""

    def __init__(self, model: Any) -> None:
        """Start counting the events of a model that Tandem loaded."""
        self._executor = model.hf_quantizer.executor
        self._device = model.device
        self._experts = ExpertStatistics()
        self._executor.listeners.append(self._experts)

    def close(self) -> None:
        """Stop counting."""
        self._executor.listeners.remove(self._experts)

    def line(self, answer: "Answer") -> str:
        """Return the statistics as one line."""
        memory = self._peak_memory_bytes()
        parts = [
            f"first token {answer.time_to_first_token_seconds:.2f} s",
            f"prefill {answer.prefill_tokens_per_second:.1f} tok/s ({answer.prompt_tokens} tokens)",
            f"decode {answer.decode_tokens_per_second:.1f} tok/s ({len(answer.token_ids)} tokens)",
            f"experts read {format_bytes(self._experts.touched_bytes)}",
            f"memory {format_bytes(memory['host'])}",
        ]
        if answer.is_interrupted:
            parts.append("interrupted")
        return "[" + " | ".join(parts) + "]"

    def json(self, answer: "Answer") -> str:
        """Return the statistics as one line of JSON; units are in the names."""
        misses = self._experts.active_experts
        return json.dumps(
            {
                "text": answer.text,
                "prompt_tokens": answer.prompt_tokens,
                "generated_tokens": len(answer.token_ids),
                "time_to_first_token_seconds": answer.time_to_first_token_seconds,
                "prefill_tokens_per_second": answer.prefill_tokens_per_second,
                "decode_tokens_per_second": answer.decode_tokens_per_second,
                "is_interrupted": answer.is_interrupted,
                "device": str(self._device),
                # All experts run on the CPU: there are no slots, each active expert is a miss.
                "expert_cache": {
                    "slots": 0, "hits": 0, "misses": misses, "hit_rate": 0.0, "fetched_bytes": 0,
                },
                "prefetch": {"issued": 0, "useful": 0},
                "experts_read_bytes": self._experts.touched_bytes,
                "experts_stored_bytes": self._executor.store.num_bytes,
                "peak_memory_bytes": self._peak_memory_bytes(),
            }
        )  # fmt: skip

    def _peak_memory_bytes(self) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES
        on_gpu = self._device.type == "cuda"
        gpu = torch.cuda.max_memory_allocated(self._device) if on_gpu else 0
        return {"host": peak, "gpu": gpu}
