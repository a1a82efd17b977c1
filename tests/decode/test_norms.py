"""Norms that are native while a prompt runs: the same rows, and the module's own otherwise."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from tandem.decode.norms import NormSwitch
from tests.architectures import build_tiny_model
from tests.threads import two_threads

pytestmark = pytest.mark.every_isa

SIZE = 192


class Counting(Qwen3MoeRMSNorm):  # type: ignore[misc]
    """Counts how often the module's own code runs."""

    calls = 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        Counting.calls += 1
        result: Tensor = super().forward(hidden_states)
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
    switch = NormSwitch(module, two_threads())
    switch.is_on = True
    actual = switch.forwards[module](x)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


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
    switch = NormSwitch(module, two_threads())
    switch.is_on = True
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for gate in (wide[..., :size].contiguous(), wide[..., size:]):  # the second is a slice
        actual = switch.forwards[module](x, gate)
        torch.testing.assert_close(actual, module(x, gate), rtol=tolerance, atol=tolerance)


def test_a_slice_is_native_and_rows_unevenly_apart_are_the_modules() -> None:
    module = norm(Counting, torch.float32)
    switch = NormSwitch(module, two_threads())
    switch.is_on = True
    wide = torch.randn(6, 3, 2 * SIZE)
    for x, own_calls in ((wide[..., :SIZE], 0), (wide[:, ::2, :SIZE], 1)):
        expected = module(x)
        Counting.calls = 0
        torch.testing.assert_close(switch.forwards[module](x), expected)
        assert Counting.calls == own_calls


def test_norms_that_are_switched_off_are_the_modules() -> None:
    module = norm(Counting, torch.float32)
    switch = NormSwitch(module, two_threads())
    x = torch.randn(3, SIZE)
    Counting.calls = 0
    assert torch.equal(switch.forwards[module](x), module(x))
    assert Counting.calls == 2


def test_other_modules_stay_their_own() -> None:
    class Doubled(Qwen3MoeRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    for module in (norm(Doubled, torch.float32), nn.LayerNorm(SIZE, bias=False), nn.Linear(4, 4)):
        assert not NormSwitch(module, two_threads()).forwards


def test_weights_may_change() -> None:
    module = norm(Qwen3MoeRMSNorm, torch.float32)
    switch = NormSwitch(module, two_threads())
    switch.is_on = True
    x = torch.randn(3, SIZE)
    with torch.no_grad():
        module.weight.mul_(3)  # type: ignore[operator]
    torch.testing.assert_close(switch.forwards[module](x), module(x))
