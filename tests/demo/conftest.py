"""The built demo models, once per session, in the user's cache directory so that CI reuses them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.cli.paths import cache_dir
from tandem.demo import DEMO_KINDS, ensure_demo_model


@pytest.fixture(scope="session")
def demo_cache() -> Path:
    """The cache directory with both demo models in it."""
    source = os.environ.get("TANDEM_DEMO_SOURCE")
    for kind in DEMO_KINDS:
        ensure_demo_model(kind, cache_dir=cache_dir(), source=Path(source) if source else None)
    return cache_dir()


@pytest.fixture
def all_threads() -> Iterator[None]:
    """Every core, for tests that need speed more than a steady time beside other programs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)
