"""Tests of choosing options within a number of bytes."""

import itertools
import random

from tandem.quality.budget import Option, choose_within


def test_what_does_not_fit_is_none_and_what_all_fits_is_best() -> None:
    parts = [[Option("a", 10, 4.0), Option("b", 20, 1.0)], [Option("a", 10, 3.0)]]
    assert choose_within(parts, 19) is None
    assert [o.name for o in choose_within(parts, 20) or []] == ["a", "a"]
    assert [o.name for o in choose_within(parts, 30) or []] == ["b", "a"]
    assert choose_within([], 0) == []


def test_the_choice_is_near_the_best_and_the_same_again() -> None:
    draw = random.Random(0)
    for _ in range(30):
        sizes = [(draw.randint(5, 40), draw.random()) for _ in range(5)]
        parts = [
            [Option(str(n), size * n, loss * 0.25**n) for n in (2, 3, 4, 6)] for size, loss in sizes
        ]
        budget = sum(size for size, _ in sizes) * 4
        chosen = choose_within(parts, budget)
        assert chosen is not None
        assert chosen == choose_within(parts, budget)
        assert sum(o.num_bytes for o in chosen) <= budget
        best = min(
            sum(o.loss for o in combo)
            for combo in itertools.product(*parts)
            if sum(o.num_bytes for o in combo) <= budget
        )
        assert sum(o.loss for o in chosen) <= 1.3 * best
