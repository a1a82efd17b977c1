"""Tests of packed linear layers on a GPU: their weights' values, in the interpreter."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from tandem.devices.cuda.linear import DeviceLinear
from tandem.hf.dense import on_device, pack_for_device
from tandem.kernels.dense import pack_dense
from tandem.kernels.formats.weight_format import find_format
from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")
CPU = torch.device("cpu")


dense = interpreted_module("tandem.triton_kernels.dense")


@pytest.mark.parametrize(
    ("name", "has_bias", "dtype"),
    [
        ("int8", True, torch.float32),
        ("int8", False, torch.float16),
        ("int4", False, torch.float32),
        ("int4", True, torch.float16),
        ("bf16", True, torch.float32),
        ("q5_k", True, torch.float32),
        ("iq4_xs", False, torch.float16),
    ],
)
def test_products_are_those_of_the_unpacked_weight(
    dense: ModuleType, name: str, has_bias: bool, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(72, 160, generator=random) / 160**0.5
    bias = torch.randn(72, generator=random) if has_bias else None
    packed = pack_dense(weight, bias, find_format(name))
    layer = DeviceLinear(dense.copy_to_device(packed, CPU), dtype)
    back = layer.on_host()
    assert torch.equal(back.values(), packed.values())
    assert (back.bias is None) == (bias is None)
    if back.bias is not None and bias is not None:
        assert torch.equal(back.bias[:72], bias)
    for shape in ((1, 1), (3,), (2, 10), (0,)):
        x = torch.randn(*shape, 160, generator=random).to(dtype)
        expected = F.linear(x.float(), packed.values(), bias)
        found = layer(x)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        tolerance = 1e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    assert (layer.weight.shape, layer.weight.dtype) == (weight.shape, dtype)


def test_groups_of_rows_have_inputs_of_their_own(dense: ModuleType) -> None:
    packed = pack_dense(torch.randn(96, 64), None, find_format("int8"))
    layer = DeviceLinear(dense.copy_to_device(packed, CPU), torch.float32)
    layer.cut(3)
    x = torch.randn(2, 5, 3, 64)
    found, weights = layer(x), packed.values().chunk(3)
    assert found.shape == (2, 5, 3, 32)
    for group, weight in enumerate(weights):
        torch.testing.assert_close(found[:, :, group], F.linear(x[:, :, group], weight))


class Block(nn.Module):
    """A layer worth packing, and one that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig(hidden_size=256)
        self.proj = nn.Linear(256, 128, dtype=torch.float16)
        self.small = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(x)
        return out


def test_layers_are_replaced_where_they_lie(dense: ModuleType) -> None:
    block = Block()
    x = torch.randn(2, 256, dtype=torch.float16)
    with torch.inference_mode():
        expected = block(x)
    num_bytes = pack_for_device(block, find_format("int8"), on_device(torch.device("cpu")))
    kinds = [type(module) for _, module in block.named_children()]
    assert kinds == [DeviceLinear, nn.Linear]
    assert 256 * 128 <= num_bytes < 1.1 * 256 * 128
    assert float((block(x) - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize(
    ("num_tokens", "outputs"), [(1, (72, 16)), (3, (40, 24, 16)), (8, (16, 40))]
)
def test_layers_of_one_input_give_what_each_gives(
    dense: ModuleType, num_tokens: int, outputs: tuple[int, ...]
) -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, 64, generator=random)
    weights = []
    for number, count in enumerate(outputs):
        bias = torch.randn(count, generator=random) if number % 2 else None
        matrix = torch.randn(count, 64, generator=random)
        weights.append(dense.copy_to_device(pack_dense(matrix, bias, find_format("int8")), CPU))
    assert dense.can_join(num_tokens, *weights)
    together = dense.multiply_together(x, weights)
    for found, weight in zip(together, weights, strict=True):
        assert torch.equal(found, dense.multiply(x, weight))


def test_only_few_rows_by_alike_layers_are_one_launch(dense: ModuleType) -> None:
    int8, wider, int4 = (
        dense.copy_to_device(pack_dense(torch.randn(16, cols), None, find_format(name)), CPU)
        for name, cols in (("int8", 64), ("int8", 128), ("int4", 64))
    )
    assert dense.can_join(8, int8, int8)
    assert not dense.can_join(9, int8, int8)
    assert not dense.can_join(1, int8, wider)
    assert not dense.can_join(1, int8, int4)
