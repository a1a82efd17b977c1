"""Tests that files of the formats' own libraries are read to the values they decode to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoint.sources.files import open_tensors
from tandem.checkpoint.sources.source import READERS
from tandem.kernels.formats import unpack
from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.packed import PackedMatrix, write_codes
from tests.kernels.formats.sources import pack_codes

FILE = Path(__file__).parent / "data" / "libraries.safetensors"


def library_cases() -> dict[str, Any]:
    with safe_open(FILE, framework="pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["configs"])
    return found


CASES = library_cases()
FORMATS = {
    "gptq-sym": "int4-g32", "gptq-zeros": "int4z-g32", "gptq-order": "int4-g32",
    "gptq-8bit": "int8-g32", "gptq-one-group": "int4-g128", "awq": "int4z-g32",
    "packed-int4": "int4-g32", "packed-int4-zeros": "int4z-g32", "packed-int4-rows": "int4-g128",
    "packed-int8": "int8-g32", "plain-int8": "int8-g128",
}  # fmt: skip
# The dtype in which the library multiplies code and scale.
DTYPES = {"gptq": torch.float16, "awq": torch.float16, "compressed-tensors": torch.bfloat16}


def library_tensors(case: str) -> dict[str, Tensor]:
    with safe_open(FILE, framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(f"{case}/")]  # noqa: SIM118
        return {name.removeprefix(f"{case}/"): file.get_tensor(name) for name in names}


def read_weight(case: str, directory: Path, tensors: dict[str, Tensor]) -> Any:
    stored = {name: t for name, t in tensors.items() if name != "values"}
    save_file(stored, directory / "model.safetensors")
    config = CASES[case]
    found = READERS[config["quant_method"]](open_tensors(directory), config)
    assert found.parts >= set(stored)
    return found.weights["x.weight"]


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_librarys(case: str, tmp_path: Path) -> None:
    tensors = library_tensors(case)
    weight = read_weight(case, tmp_path, tensors)
    assert weight.shape == tuple(tensors["values"].shape)
    values = weight.read().values(weight.name)
    dtype = DTYPES[CASES[case]["quant_method"]]
    assert torch.equal(values.to(dtype).float(), tensors["values"])


@pytest.mark.parametrize("case", CASES)
def test_packed_codes_hold_the_same_values(case: str, tmp_path: Path) -> None:
    weight = read_weight(case, tmp_path, library_tensors(case))
    assert weight.formats[0].name == FORMATS[case]
    codes = weight.read()
    expected = codes.values(weight.name)
    for fmt in weight.formats:
        packed = PackedMatrix.empty(weight.shape[0], weight.shape[1], fmt)
        coded: CodedMatrix = codes.coded(fmt, weight.name)
        write_codes(packed.blocks, fmt, coded)
        found = torch.empty(weight.shape)
        order = codes.input_order
        found[:, order if order is not None else slice(None)] = unpack(packed)
        if fmt.kind == "int4z":  # zero * scale is rounded to fp16
            step = codes.scales.float().abs().max().item()
            assert (found - expected).abs().max() < 0.01 * step
        else:
            assert torch.equal(found, expected)


def test_zero_points_stored_less_one(tmp_path: Path) -> None:
    tensors = library_tensors("gptq-sym")
    tensors["x.qzeros"] = tensors["x.qzeros"] - 0x11111111
    save_file({n: t for n, t in tensors.items() if n != "values"}, tmp_path / "model.safetensors")
    config = CASES["gptq-sym"] | {"checkpoint_format": "gptq"}
    found = READERS["gptq"](open_tensors(tmp_path), config)
    values = found.weights["x.weight"].read().values("x")
    assert torch.equal(values.half().float(), tensors["values"])


def test_activation_order_is_not_the_inputs_own(tmp_path: Path) -> None:
    codes = read_weight("gptq-order", tmp_path, library_tensors("gptq-order")).read()
    assert codes.input_order is not None
    assert not torch.equal(codes.input_order, torch.arange(len(codes.input_order)))


def test_int8_keeps_the_lowest_code() -> None:
    """compressed-tensors rounds down to -128, which Tandem's quantiser never does."""
    from tandem.kernels.formats import find_format

    codes = torch.full((16, 32), -128, dtype=torch.int8)
    packed = pack_codes(codes, torch.ones(16, 1).half(), find_format("int8-g32"))
    assert torch.equal(unpack(packed), torch.full((16, 32), -128.0))
