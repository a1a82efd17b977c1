"""Tests of `tandem plan --tokens-per-second`: the largest size with at least this speed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cli.main import main
from tandem.core.errors import CapacityError
from tandem.forecast.largest_size import SizeProposal, largest_size
from tests.architectures import build_tiny_model
from tests.hf.tiny import byte_tokenizer

BITS = {"bf16": 16.0, "int8": 8.0, "q6_k": 6.5, "iq4_xs": 4.25}


def proposal(
    tokens_per_second: float,
    *,
    memory: int = 20_000,
    speed: float | str = 0.0,
    smallest_gpu: float = 16,
) -> SizeProposal:
    """Plan 8,000 weights on a machine with this memory bandwidth in bytes per second."""

    def plan_with(name: str) -> Any:
        bits = BITS.get(name, 4.0)
        if bits > smallest_gpu:
            raise CapacityError("the dense parts do not fit")
        size = int(1000 * bits)
        sizes = SimpleNamespace(experts_bytes=size, total_dense_bytes=0)
        return SimpleNamespace(
            sizes=sizes, fits=size <= memory, needed_bytes=size, available_bytes=memory
        )

    def with_speed(name: str, plan: Any) -> Any:
        assert plan.fits, "only what fits is measured"
        of_size: Any = speed
        if not isinstance(speed, str):
            of_size = SimpleNamespace(decode_tokens_per_second=speed / plan.sizes.experts_bytes)
        return SimpleNamespace(speed=of_size)

    return largest_size(
        plan_with, with_speed, num_weights=8000, tokens_per_second=tokens_per_second
    )


def test_the_largest_that_is_fast_enough_is_proposed() -> None:
    found = proposal(20, speed=160_000)
    assert (found.num_bytes, found.bits_per_weight, found.tokens_per_second) == (8000, 8, 20)
    sentence = "8.00 bits a weight, forecast: 20.0 tok/s): tandem pack m --size"
    assert sentence in found.sentence("m")
    assert proposal(20, speed=320_000).bits_per_weight == 16
    assert proposal(20, speed=320_000, memory=7999).bits_per_weight == 6.5
    assert proposal(20, speed=320_000, smallest_gpu=5).bits_per_weight == 4


def test_where_no_size_is_fast_enough_or_fits_the_reason_is_reported() -> None:
    slow = proposal(20, speed=8000)
    assert "the smallest, 3.91 KiB (4.00 bits a weight), is forecast at 2.0" in slow.sentence("m")
    assert slow.as_json()["bytes"] is None
    assert "100 B of memory are missing at the smallest" in proposal(20, memory=3900).sentence("m")
    assert "no profile" in proposal(20, speed="no profile").sentence("m")
    with pytest.raises(CapacityError, match="in no format"):
        proposal(20, smallest_gpu=1)


def test_the_size_is_what_pack_takes() -> None:
    found = SizeProposal(20, 17_239_999_999, 4.5, 23.0, "")
    assert found.as_json()["pack"] == ["--size", "17.23GB"]


def test_plan_proposes_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    model = str(tmp_path / "tiny")
    build_tiny_model("mixtral").bfloat16().save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    flags = ["--tokens-per-second", "0.02", "--memory", "40GB", "--json"]
    assert main(["plan", model, *flags]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["largest_size"]
    assert found["bits_per_weight"] == 16
    assert found["decode_tokens_per_second"] > 0.02
    assert f"tandem pack {model} --size" in " ".join(lines)
    assert main(["plan", model, "--tokens-per-second", "5", "--no-measure"]) == 2
    assert "leave --no-measure out" in capsys.readouterr().err
