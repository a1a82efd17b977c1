"""The recipe: every number that decides a weight of the demo models."""

from collections.abc import Callable
from dataclasses import dataclass

DEMO_KINDS = ("demo", "demo-equal")

Progress = Callable[[str, int, int], None]
"""Called as (stage, done, total); each stage runs once, from 0 to its total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The numbers by which a demo model is built.

    `version` must be incremented when a number, or the code that reads it, changes.
    """

    version: int = 1
    seed: int = 0
    num_experts: int = 8
    num_experts_per_tok: int = 2
    # 2,048 gate inputs per centroid, on average.
    calibration_tokens: int = 16_384
    window_tokens: int = 512
    kmeans_steps: int = 25
    # Share of all (token, expert) pairs. 1/8 is uniform; half of that keeps all experts in use.
    min_expert_share: float = 0.06
    # The two routing weights are neither one-hot nor equal: the median token has .65 and .35.
    median_top_weight: float = 0.65
    difference_rank: int = 8
    # Ratio of Frobenius norms: an expert's difference to the dense matrix.
    difference_norm: float = 0.05
    shard_bytes: int = 500_000_000


RECIPE = Recipe()


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Do nothing, for callers that do not watch progress."""
