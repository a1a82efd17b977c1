"""Tests of the native row reader: its rows, and its errors."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels import _native


def table(file: Path, rows: Tensor, patience: float = 60.0) -> _native.RowTables:
    file.write_bytes(b"x" * 100 + rows.numpy().tobytes())
    half = len(rows) // 2
    parts = [(str(file), 100, half), (str(file), 100 + half * rows.shape[1], len(rows) - half)]
    return _native.RowTables([(parts, rows.shape[1])], 4, patience)


def read(tables: _native.RowTables, rows: Tensor, numbers: Tensor) -> Tensor:
    out = torch.empty(len(numbers), rows.shape[1], dtype=torch.uint8)
    tables.read(0, numbers, out)
    return out


@pytest.mark.parametrize("row_bytes", [1, 320, 4096, 20_480])
def test_rows_of_any_size_and_place_are_read_in_order(tmp_path: Path, row_bytes: int) -> None:
    rows = torch.randint(0, 256, (301, row_bytes), dtype=torch.uint8)
    tables = table(tmp_path / "rows", rows)
    for count in (0, 1, 5, 1000):
        numbers = torch.randint(0, len(rows), (count,))
        numbers[:2] = torch.tensor([0, len(rows) - 1])[:count]
        assert torch.equal(read(tables, rows, numbers), rows[numbers])
    for number in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"row {number} of a table of 301 rows"):
            read(tables, rows, torch.tensor([0, number]))


def test_a_row_that_is_requested_again_is_read_once(tmp_path: Path) -> None:
    rows = torch.randint(0, 256, (301, 320), dtype=torch.uint8)
    numbers = torch.tensor([5, 7, 5, 5, 300, 7, 0] * 50)
    tables, each_once = (table(tmp_path / name, rows) for name in ("rows", "once"))
    assert torch.equal(read(tables, rows, numbers), rows[numbers])
    read(each_once, rows, numbers.unique())
    assert tables.counts().rows == len(numbers)
    assert tables.counts().read_bytes == each_once.counts().read_bytes


def test_a_disk_that_is_silent_is_a_sentence_and_late_rows_go_nowhere(tmp_path: Path) -> None:
    rows = torch.randint(0, 256, (300, 64), dtype=torch.uint8)
    tables = table(tmp_path / "rows", rows, patience=0.05)
    tables.fail(0, 1, 0.3)
    with pytest.raises(ModelError, match="delivered no row for 0 seconds"):
        read(tables, rows, torch.arange(100))
    tables.fail(0, 0, 0.0)
    late = read_when_it_answers(tables, rows)
    assert torch.equal(late, rows)


def read_when_it_answers(tables: _native.RowTables, rows: Tensor) -> Tensor:
    while True:
        try:
            return read(tables, rows, torch.arange(len(rows)))
        except ModelError:  # the readers still sleep
            continue
