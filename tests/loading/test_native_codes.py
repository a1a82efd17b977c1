"""Tests that native code places safetensors codes byte for byte as the reference does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoint.sources.files import open_tensors
from tandem.checkpoint.sources.source import READERS
from tandem.core.errors import ModelError
from tandem.kernels.formats import PackedMatrix, WeightFormat
from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.file_rows import FileFields, Placing, write_file_rows
from tandem.kernels.formats.packed import write_codes
from tests.loading.checkpoints import FORMATS
from tests.loading.test_library_weights import CASES, library_tensors, read_weight

SHAPES = [(16, 128), (40, 96), (272, 384)]
IN_ORDER = [name for name in FORMATS if name != "gptq-order"]


def mxfp4_tensors(weight: Tensor) -> dict[str, Tensor]:
    """Return gpt-oss's MXFP4 tensors: the codes of two experts."""
    rows, cols = weight.shape
    shape = (2, rows, cols // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return {"blocks": blocks, "scales": torch.randint(100, 140, shape, dtype=torch.uint8)}


def stored(
    directory: Path, name: str, shape: tuple[int, int], damage: dict[str, float] | None = None
) -> Any:
    """Write a weight in a format and return it unread; `damage` changes parts' last numbers."""
    torch.manual_seed(shape[0])
    weight = torch.randn(shape) / 8
    if name == "mxfp4":
        tensors = {f"x_{part}": tensor for part, tensor in mxfp4_tensors(weight).items()}
        config: dict[str, Any] = {"quant_method": "mxfp4"}
    else:
        tensors = {f"x.{part}": t for part, t in FORMATS[name].write(weight).items()}
        config = FORMATS[name].config
    for part, number in (damage or {}).items():
        tensors[part] = tensors[part].clone()
        tensors[part].view(-1)[-1] = number
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    found = READERS[config["quant_method"]](open_tensors(directory), config)
    return found.weights["x" if name == "mxfp4" else "x.weight"]


def filled(fmt: WeightFormat, shape: tuple[int, ...], write: Callable[..., None]) -> PackedMatrix:
    packed = PackedMatrix.empty(shape[0], shape[1], fmt)
    packed.data.fill_(0xA5)
    assert packed.scales is not None
    packed.scales.view(torch.uint8).fill_(0xA5)
    write(packed)
    return packed


def require_same(fmt: WeightFormat, source: FileFields, coded: CodedMatrix) -> None:
    shape = (source.num_rows, source.num_cols)
    found = filled(fmt, shape, lambda p: write_file_rows([Placing(p.blocks, fmt, source)]))
    expected = filled(fmt, shape, lambda p: write_codes(p.blocks, fmt, coded))
    assert torch.equal(found.data, expected.data)
    assert found.scales is not None
    assert expected.scales is not None
    assert torch.equal(found.scales.view(torch.uint8), expected.scales.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [*IN_ORDER, "mxfp4"])
def test_bytes_are_the_references(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    weight = stored(tmp_path, name, shape)
    expert = 1 if name == "mxfp4" else None
    for fmt in weight.formats:
        codes, rows = weight.read(expert), weight.in_file(fmt, expert)
        if rows is None:  # of a wider format
            assert fmt.bits == 8
            assert name in ("gptq", "gptq-zeros", "awq", "packed-int4")
            continue
        require_same(fmt, rows[0], codes.coded(fmt, weight.name))


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_the_libraries_weights(case: str, tmp_path: Path) -> None:
    weight = read_weight(case, tmp_path, library_tensors(case))
    codes, fmt = weight.read(), weight.formats[0]
    rows = weight.in_file(fmt)
    assert (rows is None) == (codes.input_order is not None)
    if rows is not None:
        require_same(fmt, rows[0], codes.coded(fmt, weight.name))


def test_rows_in_turn_are_halves(tmp_path: Path) -> None:
    weight = stored(tmp_path, "mxfp4", (40, 96))
    fmt = weight.formats[0]
    (rows,), coded = weight.in_file(fmt, 0), weight.read(0).coded(fmt, "x")
    for half in range(2):
        require_same(fmt, rows.rows_at(slice(half, None, 2)), coded.rows(slice(half, None, 2)))


@pytest.mark.parametrize(
    ("name", "part", "number"),
    [
        ("mxfp4", "x_scales", 255), ("gptq", "x.scales", torch.nan), ("awq", "x.scales", torch.inf),
        ("fp8", "x.weight_scale_inv", torch.nan), ("fp8", "x.weight", torch.nan),
        ("nvfp4", "x.weight_global_scale", 0.0),
    ],
)  # fmt: skip
def test_what_a_format_does_not_hold_is_an_error(
    name: str, part: str, number: float, tmp_path: Path
) -> None:
    weight = stored(tmp_path, name, (40, 96), {part: number})
    fmt = weight.formats[0]
    (rows,) = weight.in_file(fmt, 1 if name == "mxfp4" else None)
    with pytest.raises(ModelError, match=r"weight's scales hold NaN or infinity"):
        filled(fmt, (40, 96), lambda p: write_file_rows([Placing(p.blocks, fmt, rows)]))
