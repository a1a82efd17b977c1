"""What all tests share: one torch thread, quiet Transformers, groups of tests, `--write-docs`."""

import os
from pathlib import Path

import pytest

# Read when torch loads its OpenMP: threads that spin for a busy core stop a shared machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

REPOSITORY = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-docs", action="store_true", help="write generated docs anew")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that share a model or a server into one process, and the longest first."""
    for item in items:
        if item.get_closest_marker("demo"):
            item.add_marker(pytest.mark.xdist_group("demo"))
        elif "server" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("server"))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    return ["demo", "server"].index(group.args[0]) if group is not None else 2


@pytest.fixture(scope="session", autouse=True)
def quiet_transformers() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

    logging.set_verbosity_error()
    logging.disable_progress_bar()
