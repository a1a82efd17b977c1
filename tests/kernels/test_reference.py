import pytest
import torch
from torch import Tensor

from tandem.kernels.reference import ExpertWeights, expert_ffn

HIDDEN, INTERMEDIATE = 8, 6


def silu_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_expert_is_two_products_around_the_gate(
    num_tokens: int, dtype: torch.dtype, has_bias: bool
) -> None:
    up, down = draw(2 * INTERMEDIATE, HIDDEN, dtype=dtype), draw(HIDDEN, INTERMEDIATE, dtype=dtype)
    up_bias = draw(2 * INTERMEDIATE, dtype=dtype) if has_bias else None
    down_bias = draw(HIDDEN, dtype=dtype) if has_bias else None
    rows = draw(num_tokens, HIDDEN)
    expected = silu_gate(rows @ up.float().T + (up_bias.float() if up_bias is not None else 0))
    expected = expected @ down.float().T + (down_bias.float() if down_bias is not None else 0)
    actual = expert_ffn(rows, ExpertWeights(up, down, up_bias, down_bias), silu_gate)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_transposed_weights_give_the_same_rows() -> None:
    up, down, rows = draw(INTERMEDIATE, HIDDEN), draw(HIDDEN, INTERMEDIATE), draw(3, HIDDEN)
    straight = expert_ffn(rows, ExpertWeights(up, down), torch.relu)
    turned = ExpertWeights(up.T.contiguous(), down.T.contiguous(), is_transposed=True)
    torch.testing.assert_close(expert_ffn(rows, turned, torch.relu), straight)
