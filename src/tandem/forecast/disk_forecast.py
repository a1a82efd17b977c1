"""How fast a model is whose experts do not all fit into memory: a bound, from bytes and rates.

The others are read from the disk while those in memory are computed. Every expert is taken to be as
likely as any other, so that the share in memory is the hit rate: routing that prefers some experts,
as models' does, hits more often.
"""

from dataclasses import dataclass

from tandem.forecast.sizes import ModelSizes
from tandem.forecast.speed_forecast import SpeedForecast
from tandem.policy.cost import DiskCosts


@dataclass(frozen=True, slots=True)
class DiskForecast:
    """Seconds of a prompt and of a decode step with experts on the disk."""

    disk: DiskCosts
    resident_share: float
    """Of the experts, by bytes: what memory holds of them."""
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float


def forecast_from_disk(
    sizes: ModelSizes, in_memory: SpeedForecast, disk: DiskCosts, room_bytes: int
) -> DiskForecast:
    """Return the speed with `room_bytes` for experts, from that with all of them in memory."""
    resident = min(1.0, max(0.0, room_bytes / sizes.experts_bytes))
    absent, rate = 1.0 - resident, disk.most_bytes_per_second
    step_bytes = sizes.top_k * sizes.num_moe_layers * sizes.expert_image_bytes
    # A step reads all of its weights once, at the memory's speed whatever they are.
    of_experts = step_bytes / (step_bytes + sizes.total_dense_bytes) * in_memory.decode_seconds
    dense = in_memory.decode_seconds - of_experts
    each_token = sizes.top_k * sizes.num_moe_layers / sizes.num_experts
    active = 1.0 - (1.0 - each_token) ** in_memory.prompt_tokens
    prompt_bytes = active * sizes.experts_bytes
    return DiskForecast(
        disk=disk,
        resident_share=resident,
        prompt_tokens=in_memory.prompt_tokens,
        prefill_seconds=max(absent * prompt_bytes / rate, in_memory.prefill_seconds),
        decode_seconds=dense + max(absent * step_bytes / rate, resident * of_experts),
    )
