"""A part of `speculation_matrix`, which compares all; every drafter and device is in it."""

from pathlib import Path

import pytest

from tests.generate.speculation_matrix import Cells, drafters_of


@pytest.mark.parametrize(("name", "device"), [("deepseek_v3", "cpu"), ("qwen3_5_moe", "emulated")])
def test_answers_are_those_without(name: str, device: str, tmp_path: Path) -> None:
    cells = Cells(name, device, tmp_path)
    for batch, drafter in enumerate(drafters_of(name), 1):
        cells.run(drafter, [batch])
