"""Tests of the demo models through the whole stack: equal experts as an oracle, then others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tandem
from tests.demo.oracle import answers, dense_answers, logits, text_windows
from tests.programs import tandem as run_tandem

pytestmark = [pytest.mark.demo, pytest.mark.usefixtures("all_threads")]


@pytest.mark.slow
def test_demo_equal_through_tandem_says_what_the_dense_model_says(demo_cache: Path) -> None:
    directory = demo_cache / "models" / "demo-equal"
    model = tandem.load(directory, dtype="fp32", expert_dtype="fp32")
    expected = dense_answers()
    actual = answers(model, AutoTokenizer.from_pretrained(directory))
    assert actual.tokens == expected.tokens
    assert actual.perplexity == pytest.approx(expected.perplexity, rel=1e-3)


@pytest.fixture(scope="module")
def window(demo_cache: Path) -> torch.Tensor:
    return text_windows(AutoTokenizer.from_pretrained(demo_cache / "models" / "demo"))[:1, :128]


@pytest.fixture(scope="module")
def exact(eager_demo: Any, window: torch.Tensor) -> torch.Tensor:
    return logits(eager_demo, window)


def test_demo_equals_transformers_eager(
    demo_cache: Path, window: torch.Tensor, exact: torch.Tensor
) -> None:
    actual = logits(tandem.load(demo_cache / "models" / "demo", dtype="fp32"), window)
    torch.testing.assert_close(actual, exact, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_demo_in_bf16_is_as_near_to_fp32_as_eager(
    demo_cache: Path, window: torch.Tensor, exact: torch.Tensor
) -> None:
    exact = exact.log_softmax(-1)

    def divergence(model: Any) -> float:
        found = logits(model, window).log_softmax(-1)
        return float((exact.exp() * (exact - found)).sum(-1).mean())

    directory = demo_cache / "models" / "demo"
    eager = AutoModelForCausalLM.from_pretrained(
        directory, dtype="bfloat16", experts_implementation="eager"
    )
    loaded = tandem.load(directory, dtype="bf16")
    assert divergence(loaded) < 1.25 * divergence(eager)


def test_tandem_run_answers_with_the_demo_model(demo_cache: Path) -> None:
    words = ["run", "--json", "--quiet", "--seed", "1", "--max-new-tokens", "12"]
    done = run_tandem(*words, "-p", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    # Whether it begins with "The" or "L'" is a tie of .1 in fp32; both continue about France.
    assert "France" in json.loads(done.stdout.splitlines()[-1])["text"]
