import pytest
from transformers import GenerationConfig

from tandem.core.errors import ConfigError
from tandem.generate.sampling import SamplingOptions


@pytest.mark.parametrize(
    ("given", "model_samples", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"seed": 1}, True, False),
        ({"temperature": 0.0}, True, False),
        ({"temperature": 0.7, "seed": 1}, False, True),
        ({"top_p": 0.9, "seed": 1}, False, True),
        ({"top_k": 5}, False, True),
        ({"top_k": 0, "min_p": 0.0}, False, False),
    ],
)
def test_greedy_by_default_with_a_seed_or_temperature_zero(
    given: dict[str, float], model_samples: bool, expected: bool
) -> None:
    assert SamplingOptions(**given).is_sampled(model_samples) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"min_tokens": -1},
        {"seed": -2},
    ],
)
def test_values_out_of_range_are_refused_by_name(given: dict[str, float]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=rf"{name} is .*; expected"):
        SamplingOptions(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (20, 0.9, 0.1)),
        ({"top_k": 0}, (None, 0.9, 0.1)),
        ({"top_k": -1}, (None, 0.9, 0.1)),
        ({"min_p": 0.0}, (20, 0.9, None)),
        ({"top_p": 1.0}, (20, 1.0, 0.1)),
        ({"top_p": 0.0}, (20, 1e-6, 0.1)),  # the likeliest token, as for the server's clients
    ],
)
def test_a_rule_that_is_off_is_left_out_whatever_the_model_says(
    given: dict[str, float], expected: tuple[float | None, ...]
) -> None:
    own = GenerationConfig(do_sample=True, top_k=20, top_p=0.9, min_p=0.1)
    rule = SamplingOptions(**given).rule(own)  # type: ignore[arg-type]
    assert (rule.top_k, rule.top_p, rule.min_p) == expected


def test_seed_minus_one_is_no_seed() -> None:
    assert SamplingOptions(seed=-1) == SamplingOptions()
