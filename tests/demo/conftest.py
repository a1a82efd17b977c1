"""The built demo models, once per session, in the user's cache directory so that CI reuses them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.cli.keeping import cache_dir
from tandem.demo import DEMO_KINDS, ensure_demo_model


@pytest.fixture(scope="session")
def demo_cache() -> Path:
    """A cache directory with both demo models."""
    source = os.environ.get("TANDEM_DEMO_SOURCE")
    for kind in DEMO_KINDS:
        ensure_demo_model(kind, cache_dir=cache_dir(), source=Path(source) if source else None)
    return cache_dir()


@pytest.fixture(scope="package")
def eager_demo(demo_cache: Path) -> Any:
    """The demo model in plain Transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(
        demo_cache / "models" / "demo", dtype=torch.float32, experts_implementation="eager"
    )


@pytest.fixture
def all_threads() -> Iterator[None]:
    """All of this process's cores, for tests that need speed."""
    threads = torch.get_num_threads()
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    yield
    torch.set_num_threads(threads)
