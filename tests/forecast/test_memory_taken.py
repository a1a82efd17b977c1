"""Tests that a load in a process of its own takes the forecast memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tandem
from tandem.bench.model_shapes import MODEL_SHAPES, ModelShape
from tandem.bench.random_model import build_random_model
from tandem.cli.keeping import cache_dir
from tandem.demo import ensure_demo_model
from tandem.hf.config import OffloadConfig

MEASURE = """
import sys, tandem, json
from tandem.generate.generator import Generator
from tandem.hf.checkpoint import open_checkpoint
from tandem.hf.config import OffloadConfig
from tandem.forecast.sizes import model_sizes
from tandem.experts.store.host_memory import process_bytes
from pathlib import Path
options = {"dense_dtype": "auto"}
sizes = model_sizes(open_checkpoint(Path(sys.argv[1])), OffloadConfig(**options))
before = process_bytes()
model = tandem.load(sys.argv[1], **options)
print(json.dumps([before + sizes.experts_bytes + sizes.total_dense_bytes, process_bytes()]))
"""


def memory_of(checkpoint: Path) -> tuple[int, int]:
    """Return the forecast and the real memory of a load in a fresh process."""
    words = [sys.executable, "-c", MEASURE, str(checkpoint)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    forecast, taken = json.loads(done.stdout.splitlines()[-1])
    return forecast, taken


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pages are mapped ahead on Linux only")
def test_a_packed_shape_takes_what_was_forecast(tmp_path: Path) -> None:
    shape = MODEL_SHAPES["qwen3-30b-a3b"]
    cut = {"num_hidden_layers": 4, "num_experts": 16, "vocab_size": 8_000}  # 390 MB of files
    model = build_random_model(
        ModelShape(shape.model_type, shape.values | cut),
        OffloadConfig(expert_dtype="int4", threads=1),
        dense_dtype="none",
    )
    forecast, taken = memory_of(tandem.save(model, tmp_path / "packed"))
    assert taken == pytest.approx(forecast, rel=0.05)


@pytest.mark.demo
@pytest.mark.slow
def test_the_demo_model_takes_what_was_forecast() -> None:
    source = os.environ.get("TANDEM_DEMO_SOURCE")
    demo = ensure_demo_model("demo", cache_dir=cache_dir(), source=Path(source) if source else None)
    forecast, taken = memory_of(demo)
    assert taken == pytest.approx(forecast, rel=0.05)
