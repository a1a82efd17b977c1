"""Finds the largest packed size of a model that is forecast to reach a given speed.

Only sizes with one format for all parts are tried. The result is a number of bytes for `tandem pack
--size`: a mixed recipe of that size runs as fast and loses less accuracy.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.errors import CapacityError
from tandem.core.units import format_bytes
from tandem.forecast.model_plan import Plan

# Largest first. The first keeps the model's weights.
_FORMATS = (
    "bf16", "int8", "q6_k", "q5_k", "int4z", "q4_k", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_s",
    "iq2_xs", "iq2_xxs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SizeProposal:
    """A size to pack a model in, or the reason why no size is proposed."""

    requested_tokens_per_second: float
    num_bytes: int
    """Size of the packed model: the largest that is fast enough, otherwise the smallest
    possible."""
    bits_per_weight: float
    tokens_per_second: float | None
    """The forecast decode speed; None if the model does not fit or has no forecast."""
    reason: str
    """The reason why no size is proposed; empty if a size is proposed."""

    @property
    def size(self) -> str:
        """The size in the form that `tandem pack --size` takes."""
        unit, name = (10**9, "GB") if self.num_bytes >= 10**9 else (10**6, "MB")
        return f"{self.num_bytes // (unit // 100) / 100:.2f}{name}"

    def sentence(self, model: str) -> str:
        """Return the proposal as a sentence."""
        if self.reason:
            return f"no size runs at {self.requested_tokens_per_second:g} tok/s: {self.reason}"
        return (
            f"the largest size at {self.requested_tokens_per_second:g} tok/s or more is "
            f"{format_bytes(self.num_bytes)} ({self.bits_per_weight:.2f} bits a weight, forecast: "
            f"{self.tokens_per_second:.1f} tok/s): tandem pack {model} --size {self.size}"
        )

    def as_json(self) -> dict[str, object]:
        """Return the proposal as JSON."""
        return {
            "bytes": None if self.reason else self.num_bytes,
            "bits_per_weight": None if self.reason else self.bits_per_weight,
            "decode_tokens_per_second": self.tokens_per_second,
            "pack": None if self.reason else ["--size", self.size],
            "reason": self.reason or None,
        }


def largest_size(
    plan_with: Callable[[str], Plan],
    with_speed: Callable[[str, Plan], Plan],
    *,
    num_weights: int,
    tokens_per_second: float,
) -> SizeProposal:
    """Return the largest size that fits and is forecast to reach the speed, or why none does.

    `num_weights` is the model's number of weights. `plan_with` must return the plan in a named
    format, and raise `CapacityError` if a GPU is too small. `with_speed` must return the plan with
    its forecast; it is called only for plans that fit, because it may measure. Raises
    `CapacityError` if a GPU is too small for all formats.
    """
    found = None
    for name in _FORMATS:
        try:
            plan = plan_with(name)
        except CapacityError:
            continue
        num_bytes = plan.sizes.experts_bytes + plan.sizes.total_dense_bytes
        bits = 8 * num_bytes / num_weights
        if not plan.fits:
            missing = format_bytes(plan.needed_bytes - plan.available_bytes)
            reason = f"{missing} of memory are missing at the smallest"
            found = SizeProposal(tokens_per_second, num_bytes, bits, None, reason)
            continue
        speed = with_speed(name, plan).speed
        # The speed of a smaller size may be known even if that of a larger one is not.
        if isinstance(speed, str):
            found = SizeProposal(tokens_per_second, num_bytes, bits, None, speed)
            continue
        decode = speed.decode_tokens_per_second
        if decode >= tokens_per_second:
            return SizeProposal(tokens_per_second, num_bytes, bits, decode, "")
        size = f"{format_bytes(num_bytes)} ({bits:.2f} bits a weight)"
        reason = f"the smallest, {size}, is forecast at {decode:.1f}"
        found = SizeProposal(tokens_per_second, num_bytes, bits, decode, reason)
    if found is None:
        raise CapacityError("the device holds the dense parts in no format; give more --gpu-memory")
    return found
