"""The demo model, whose experts differ: a wrong slot would change what it says."""

from pathlib import Path

import pytest

from tandem.sim.systems import POLICIES
from tests.demo.hybrid_matrix import SLOTS, Matrix, pairwise_rows, prompts

ROWS_IN_CI = 6  # python -m tests.demo.hybrid_matrix runs all


def test_every_pair_of_policies_is_in_the_matrix() -> None:
    rows = list(pairwise_rows())
    assert len({(row.assignment, row.eviction) for row in rows}) == 108
    num_predictions = len(POLICIES.predictions.names())
    assert len({(row.prediction, row.slots) for row in rows}) == num_predictions * len(SLOTS) >= 10


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.usefixtures("all_threads")
def test_the_hybrid_demo_says_what_the_cpu_says(demo_cache: Path) -> None:
    matrix = Matrix(demo_cache / "models" / "demo", prompts(2), max_new_tokens=8)
    shares = []
    for number, row in zip(range(ROWS_IN_CI), pairwise_rows(), strict=False):
        shares.append(matrix.check(row, number, 1 + number % 2).device_share)
    assert max(shares) > 0.5
    assert min(shares) < 0.5
