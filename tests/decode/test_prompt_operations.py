"""Tests of torch functions that are native during a prompt, against torch."""

import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tandem
from tandem.decode.substitutions.prompt_operations import PromptOperations
from tandem.decode.substitutions.rotary import rotary_like
from tandem.generate.generator import Generator
from tandem.recording.coverage import TorchWork
from tests.architectures import build_tiny_model
from tests.conftest import two_threads

pytestmark = pytest.mark.every_isa

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(0, 8), (1, 8), (1, 3, 40), (1, 4, 700, 64)]  # the last one on all threads
Step = Callable[[Tensor], Tensor | tuple[Tensor, ...]]

NATIVE: dict[str, Step] = {
    "sums": lambda x: x + x * 2 - (x / 3 + 1),
    "a row for all": lambda x: x * x[..., :1, :] + x[..., :1],
    "two types": lambda x: x * x[..., :1].float(),
    "in place": lambda x: (x + 0).mul_(2).add_(x).div_(x.abs() + 1),
    "activations": lambda x: F.silu(x) * torch.sigmoid(x) + F.relu(-x).tanh(),
    "angles": lambda x: torch.cat((x.float().cos(), x.float().sin()), dim=-1).to(x.dtype),
    "casts": lambda x: (x.to(torch.bfloat16).float(), x.type(torch.float32), x.type_as(x)),
    "side by side": lambda x: torch.cat((x, x[..., 1:]), dim=-1),
    "transposed": lambda x: (x.transpose(-1, -2) + 1) * 2,
}
OF_ROWS: dict[str, Step] = {
    "a router's choice": lambda x: _choice(x),
    "mean": lambda x: x.mean(-1, keepdim=True) + x.sum(dim=-1)[..., None],
}


def _choice(x: Tensor) -> tuple[Tensor, ...]:
    weights, index = torch.topk(F.softmax(x, dim=-1, dtype=torch.float), 4, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(x.dtype), index


def distinct(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return distinct values: random ones would be equal in bf16."""
    order = torch.rand(shape).argsort(-1)
    return (order / 16 - 2).to(dtype)


def check(step: Step, x: Tensor, *, tolerance: float) -> None:
    work = TorchWork()
    with torch.inference_mode():
        expected = step(x)
        with PromptOperations(two_threads()), work:
            actual = step(x)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert [op for op in work.calls if op not in ("abs",)] == []


@pytest.mark.parametrize("step", NATIVE.values(), ids=NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_torchs(step: Step, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        x = torch.randn(shape).to(dtype)
        check(step, x, tolerance=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("step", OF_ROWS.values(), ids=OF_ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (700, 64), (2, 3, 33)])
def test_rows_are_torchs(step: Step, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(step, distinct(shape, dtype), tolerance=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("is_wide", [False, True])
def test_routers_product_does_not_depend_on_the_rows(num_tokens: int, is_wide: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 128).bfloat16(), torch.randn(40, 128).bfloat16()
    dtype = torch.float32 if is_wide else torch.bfloat16

    def logits(rows: Tensor) -> Tensor:
        return F.linear(rows.to(dtype), weight.to(dtype))

    work = TorchWork()
    with torch.inference_mode(), PromptOperations(two_threads()), work:
        actual, whole = logits(x[:num_tokens]), logits(x)
    torch.testing.assert_close(actual, logits(x[:num_tokens]), rtol=2e-2, atol=2e-2)
    assert torch.equal(actual, whole[:num_tokens])
    assert not work.calls


def test_what_was_bf16_is_not_taken_for_it_once_it_was_written() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(40, 64).bfloat16().float()
    with torch.inference_mode(), PromptOperations(two_threads()):
        wide = x.float().mul_(1 / 3)
        actual = F.linear(wide, weight)
    torch.testing.assert_close(actual, (x.float() / 3) @ weight.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "step",
    [
        lambda: torch.tensor([1, 2]) + 1,
        lambda: torch.tensor([True]) * 2.5,
        lambda: torch.ones(3, dtype=torch.float64) * 2,
        lambda: torch.ones(3).to(torch.float64),
        lambda: torch.ones(3) + True,
        lambda: torch.ones(3) * torch.tensor(2.0),
        lambda: torch.add(torch.ones(3), torch.ones(3), alpha=2),
        lambda: torch.ones(2, 3).sum(),
        lambda: torch.ones(2, 3).softmax(0),
        lambda: torch.ones(2, 3).topk(1, dim=0)[0],
        lambda: torch.ones(2, 3).half().softmax(-1),
        lambda: torch.ones(3).bfloat16().add_(torch.ones(3)),
    ],
)
def test_other_calls_stay_torchs(step: Callable[[], Tensor]) -> None:
    with torch.inference_mode():
        expected = step()
        with PromptOperations(two_threads()):
            actual = step()
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


ROTARY = [  # file, width of the tables, whether it is native
    ("qwen3_moe", 16, True),
    ("glm4_moe", 8, True),
    ("qwen3_next", 8, True),
    ("gpt_oss", 8, False),
    ("ernie4_5_moe", 16, False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "rotated", "is_native"), ROTARY)
@pytest.mark.parametrize("num_tokens", [1, 1100])
def test_rotary_embeddings_are_the_models(
    name: str, rotated: int, is_native: bool, num_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    own = module.apply_rotary_pos_emb
    query, key = (torch.randn(1, num_tokens, n, 16).to(dtype).transpose(1, 2) for n in (8, 2))
    cos, sin = (torch.rand(1, num_tokens, rotated).to(dtype) for _ in range(2))
    work, rotate = TorchWork(), rotary_like(own)
    with torch.inference_mode():
        assert rotate is None or rotate(query, key, cos, sin) is None  # no prompt runs
        with PromptOperations(two_threads()), work:
            actual = None if rotate is None else rotate(query, key, cos, sin)
        expected = own(query, key, cos, sin)
    assert (actual is not None) == is_native
    if actual is not None:
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(actual, tuple(expected), rtol=tolerance, atol=tolerance)
    assert not work.calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 1100])
@pytest.mark.parametrize("rotated", [8, 64])
def test_neighbours_that_heads_end_with_are_turned(
    rotated: int, num_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    own = module.apply_rotary_pos_emb
    x = torch.randn(1, num_tokens, 8, 64).to(dtype).transpose(1, 2)
    cos, sin = (torch.rand(1, num_tokens, rotated // 2).to(dtype) for _ in range(2))
    rotate = rotary_like(own)
    assert rotate is not None
    with torch.inference_mode():
        assert rotate(x, cos, sin) is None  # no prompt runs
        with PromptOperations(two_threads()):
            actual = rotate(x, cos, -sin)
            by_token = rotate(x.transpose(1, 2), cos, -sin, unsqueeze_dim=2)
        expected = own(x, cos, -sin)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(by_token.transpose(1, 2), actual)


def left_of_a_prompt(num_layers: int, folder: Path) -> Counter[str]:
    model = build_tiny_model("qwen3_moe", values={"num_hidden_layers": num_layers})
    model.save_pretrained(folder)
    isa = two_threads().isa
    loaded: Any = tandem.load(
        str(folder), dtype="bfloat16", expert_dtype="int8", dense_dtype="int8", threads=2, isa=isa
    )
    pool = Generator(loaded).slot_pool(1)
    prompt = list(range(3, 73))
    pool.prefill({0: prompt})
    pool.keep(0, 0)
    work = TorchWork()
    with work:
        pool.prefill({0: prompt})
    return work.calls


def test_no_layer_of_a_qwen3_moe_calls_torch(tmp_path: Path) -> None:
    few = left_of_a_prompt(2, tmp_path / "few")
    assert left_of_a_prompt(3, tmp_path / "more") == few
    assert few.keys() <= {"cumsum", "sub", "arange", "cat", "index", "stack", "amax", "sum", "item"}
