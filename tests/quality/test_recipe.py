"""Tests of which formats recipes use, and when."""

import pytest

from tandem.core.errors import ConfigError
from tandem.quality.budget import Option
from tandem.quality.recipe import Measured

# Of 800 weights each: grids lose least for their bytes.
OPTIONS = [
    Option("iq2_xxs", 206, 0.5), Option("iq3_s", 344, 0.1), Option("q3_k", 356, 0.3),
    Option("q3_k+iq3_s", 350, 0.2), Option("q5_k", 562, 0.01),
]  # fmt: skip
MEASURED = Measured([OPTIONS, OPTIONS], {("head",): OPTIONS}, fixed_bytes=0, num_weights=2400)


def test_grids_are_for_recipes_below_four_bits() -> None:
    """Grids decode slower than other formats of their size."""
    below = MEASURED.recipe(1199)
    assert "iq3_s" in below.expert_formats
    above = MEASURED.recipe(1200)
    assert {*above.expert_formats, *above.dense_formats.values()} == {"q3_k"}


def test_a_size_that_no_recipe_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"2\.06 to 5\.62 bits a weight"):
        MEASURED.recipe(500)
