"""Tests of comparing a model with a reference: plain torch, and itself."""

import math
from pathlib import Path

import pytest
import torch

import tandem
from tandem.core.errors import ConfigError
from tandem.quality.comparison import Tally, measure
from tandem.quality.kept_logits import KeptLogits, LogitsWriter
from tandem.quality.texts import Window

LENGTHS = (1, 2, 150)  # one piece of tokens, and more


def windows() -> list[Window]:
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(60, (n,), generator=random).tolist() for n in LENGTHS]
    return [Window("ab"[n > 2], tuple(row)) for n, row in zip(LENGTHS, ids, strict=True)]


def test_numbers_are_those_of_plain_torch(checkpoint: Path, tmp_path: Path) -> None:
    model = tandem.load(checkpoint, dtype="float32")
    with LogitsWriter(tmp_path / "kept", windows(), "") as writer:
        alone = measure(model, windows(), writer=writer)
    expected = [model(input_ids=torch.tensor([w.ids])).logits[0].double() for w in windows()]
    loss = [
        torch.nn.functional.cross_entropy(x[:-1], torch.tensor(w.ids[1:]).long(), reduction="none")
        for x, w in zip(expected, windows(), strict=True)
    ]
    assert alone.total().perplexity == pytest.approx(torch.cat(loss).mean().exp().item(), rel=1e-4)
    assert alone.by_domain()["a"].tokens == 3
    assert alone.total().kl_mean is None

    kept = KeptLogits(tmp_path / "kept")
    itself = measure(model, windows(), reference=kept).total()
    assert itself.kl_mean == pytest.approx(0, abs=1e-6)
    assert itself.same_first_choice == 1
    assert itself.reference_perplexity == pytest.approx(itself.perplexity, rel=1e-4)

    rounded = tandem.load(checkpoint, dtype="float32", expert_dtype="int4")
    other = [rounded(input_ids=torch.tensor([w.ids])).logits[0].double() for w in windows()]
    kl = [
        (x.softmax(-1) * (x.log_softmax(-1) - y.log_softmax(-1))).sum(-1)
        for x, y in zip(expected, other, strict=True)
    ]
    found = measure(rounded, windows(), reference=kept)
    assert found.total().kl_mean == pytest.approx(torch.cat(kl).mean().item(), rel=0.05)
    assert found.total().kl_p99 == pytest.approx(torch.cat(kl).quantile(0.99).item(), rel=0.05)
    assert found.by_domain()["b"].kl_mean == pytest.approx(kl[2].mean().item(), rel=0.05)


def test_a_reference_of_another_width_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with LogitsWriter(tmp_path / "kept", windows(), "") as writer:
        for number, window in enumerate(windows()):
            writer.add(number, torch.zeros(len(window.ids), 7))
    model = tandem.load(checkpoint, dtype="float32")
    with pytest.raises(ConfigError, match="compare models of one vocabulary"):
        measure(model, windows(), reference=KeptLogits(tmp_path / "kept"))


def test_a_window_of_one_token_has_no_next_one() -> None:
    tally = Tally()
    tally.add("a", [], torch.zeros(1, 5), torch.zeros(1, 5))
    assert math.isnan(tally.total().perplexity)
    assert tally.total().kl_mean == 0
