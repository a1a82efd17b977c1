import pytest

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
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"seed": -1},
    ],
)
def test_values_out_of_range_are_refused_by_name(given: dict[str, float]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=rf"{name} is .*; expected"):
        SamplingOptions(**given)  # type: ignore[arg-type]
