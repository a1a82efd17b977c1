"""Tests of norms that are native during a prompt and the module's own otherwise."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4RMSNorm,
    DeepseekV4UnweightedRMSNorm,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from tandem.decode.substitutions.norms import NORM
from tandem.decode.substitutions.prompt_operations import PromptOperations
from tests.architectures import build_tiny_model
from tests.conftest import two_threads

pytestmark = pytest.mark.every_isa

SIZE = 192


def native(module: Any, *args: Tensor) -> Tensor | None:
    """Apply a norm as during a prompt; return None if the module's own code ran."""
    assert NORM.matches(module)
    with PromptOperations(two_threads()):
        result: Tensor | None = NORM.forward(module, *args)
    return result


def norm(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module = kind(SIZE)
    nn.init.uniform_(module.weight, 0.5, 1.5)  # type: ignore[arg-type]
    return module.to(dtype)


@pytest.mark.parametrize("kind", [Qwen3MoeRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 1500])  # the last one on all threads
def test_rows_are_the_modules(kind: type[nn.Module], dtype: torch.dtype, num_rows: int) -> None:
    module = norm(kind, dtype)
    x = torch.randn(2, num_rows, SIZE).to(dtype)
    expected = module(x)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(native(module, x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "nemotron_h", "granitemoehybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 1500])
def test_gated_rows_are_the_modules(name: str, dtype: torch.dtype, num_rows: int) -> None:
    modules = build_tiny_model(name).modules()
    module = next(m for m in modules if type(m).__name__.endswith("RMSNormGated")).to(dtype)
    (weight,) = module.parameters()
    nn.init.uniform_(weight, 0.5, 1.5)
    size = len(weight)
    x, wide = torch.randn(2, num_rows, size).to(dtype), torch.randn(2, num_rows, 2 * size).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for gate in (wide[..., :size].contiguous(), wide[..., size:]):  # the second is a slice
        actual = native(module, x, gate)
        if actual is None:  # groups of a slice have irregular strides
            assert not gate.is_contiguous()
        else:
            torch.testing.assert_close(actual, module(x, gate), rtol=tolerance, atol=tolerance)


def test_a_slice_is_native_and_rows_unevenly_apart_are_the_modules() -> None:
    module, wide = norm(Qwen3MoeRMSNorm, torch.float32), torch.randn(6, 3, 2 * SIZE)
    rows = wide[..., :SIZE]
    torch.testing.assert_close(native(module, rows), module(rows))
    assert native(module, wide[:, ::2, :SIZE]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 1500])
def test_norms_without_weights_and_with_weights_in_fp32(dtype: torch.dtype, num_rows: int) -> None:
    """DeepSeek-V4 has both kinds, and applies them to (heads, tokens) and (tokens, heads)."""
    bare, weighted = DeepseekV4UnweightedRMSNorm(1e-6), norm(DeepseekV4RMSNorm, torch.float32)
    x = torch.randn(2, num_rows, 3, SIZE).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for module in (bare, weighted):
        for rows in (x, x.transpose(1, 2)):
            actual, expected = native(module, rows), module(rows)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
            assert actual is not None
            assert (actual == expected).float().mean() > 0.98 or dtype == torch.float32


def test_norms_are_the_modules_while_no_prompt_runs() -> None:
    assert NORM.forward(norm(Qwen3MoeRMSNorm, torch.float32), torch.randn(3, SIZE)) is None


def test_other_modules_stay_their_own() -> None:
    class Doubled(Qwen3MoeRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    x = torch.randn(3, SIZE)
    for module in (norm(Doubled, torch.float32), nn.LayerNorm(SIZE, bias=False)):
        assert native(module, x) is None
    linear: Any = nn.Linear(4, 4)
    assert not NORM.matches(linear)


def test_weights_may_change() -> None:
    module, x = norm(Qwen3MoeRMSNorm, torch.float32), torch.randn(3, SIZE)
    with torch.no_grad():
        module.weight.mul_(3)  # type: ignore[operator]
    torch.testing.assert_close(native(module, x), module(x))
