"""Shared configuration of all tests: one torch thread, quiet Transformers, groups, two options.

`--isa NAME` (or `best`) runs all tests with that instruction set of the CPU kernels, so that the
machine does not decide what is tested. Without it, tests marked `every_isa`, whose results depend
on the kernels, run with each instruction set of this processor that has kernels of all kinds. Of
the parameter that `first_of` names, such as the architecture, only the first value runs with each
of them; the others run with the best. `--isa all` runs all values with all of them. Fixtures that
start kernels depend on `isa`, so that they start again.

`--write-docs` writes the generated documents.
"""

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from tandem.experts.store.host_store import HostStore
    from tandem.kernels.dense import CpuThreads

# Random cases have no time limit, because machines are shared.
# `make test-slow` runs Hypothesis' default number of cases.
hypothesis.settings.register_profile("tandem", deadline=None, max_examples=40)
hypothesis.settings.register_profile("slow", deadline=None)
hypothesis.settings.load_profile("tandem")

# Read when torch loads its OpenMP: threads that spin for a busy core would stall a shared machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

REPOSITORY = Path(__file__).parent.parent
# Modules whose tests share at most a model, by the architecture or GPU in a test's name.
_EACH_ALONE = ("test_architectures", "test_models", "test_triton_launches")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-docs", action="store_true", help="write generated docs again")
    parser.addoption("--isa", help="the kernels' instruction set, best, or all; see above")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--isa") not in (None, "all"):
        _force(_isas(config)[0], pytest.MonkeyPatch())


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()  # what exists after collection stays


def pytest_collection_finish() -> None:
    """Freeze the garbage collector's objects: no collection has to visit ten thousand tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("every_isa"):
        if "isa" not in metafunc.fixturenames:
            metafunc.fixturenames.append("isa")
        metafunc.parametrize("isa", _isas(metafunc.config), indirect=True, scope="module")


def _isas(config: pytest.Config) -> list[str]:
    from tandem.kernels._native import available_isas

    match config.getoption("--isa"):
        case None:
            best, *others = available_isas()
            # Only their products differ from AVX-512's and AVX2's; tests/kernels runs them all.
            alike = {"avxvnni", *(("avx512",) if best == "amx" else ())}
            return [best, *(isa for isa in others if isa not in alike)]
        case "all":
            return available_isas()
        case "best":
            return available_isas()[:1]
        case name:
            return [name]


@pytest.fixture(scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set the instruction set of kernels that start without one, also in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        _force(request.param, patch)
        yield request.param


def _force(name: str, patch: pytest.MonkeyPatch) -> None:
    from tandem.kernels import engine

    patch.setattr(engine, "best_isa", lambda: name)
    patch.setenv("TANDEM_ISA", name)


@pytest.fixture(scope="module")
def threads(isa: str) -> "CpuThreads":
    """Kernel threads with the requested instruction set, or the best one."""
    return two_threads()


def two_threads() -> "CpuThreads":
    """Return two kernel threads, reused, with the requested instruction set or the best one."""
    from tandem.kernels import engine

    return _threads(engine.best_isa())


@functools.cache
def _threads(isa: str) -> "CpuThreads":
    from tandem.kernels.dense import CpuThreads

    return CpuThreads(num_threads=2, isa=isa)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests that share a model, a server or a module in one process, the longest first.

    So their fixtures are built once, not once per process.
    """
    if config.getoption("--isa") is None:
        repeated = _repeated(items, _isas(config)[0])
        config.hook.pytest_deselected(items=repeated)
        left_out = set(map(id, repeated))
        items[:] = [item for item in items if id(item) not in left_out]
    for item in items:
        if item.get_closest_marker("demo"):
            item.add_marker(pytest.mark.xdist_group("demo"))
        elif isinstance(item, pytest.Function) and "server" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("server"))
        else:
            parts = [*item.path.parts[-2:]]
            if item.path.stem in _EACH_ALONE:
                parts.append(_name_of(item))
            item.add_marker(pytest.mark.xdist_group("/".join(parts)))
    items.sort(key=_turn)


def _name_of(item: pytest.Item) -> str:
    """Return the architecture that a test is parametrised by, or the test's name."""
    callspec = getattr(item, "callspec", None)
    return item.name if callspec is None else str(callspec.params.get("name", item.name))


def _repeated(items: list[pytest.Item], best: str) -> list[pytest.Item]:
    """Return tests with neither the best instruction set nor the first value of `first_of`."""
    first: dict[str, object] = {}
    found: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker("every_isa")
        if marker is None or not isinstance(item, pytest.Function):
            continue
        params = item.callspec.params
        value = params.get(marker.kwargs.get("first_of", ""))
        is_first = value == first.setdefault(item.nodeid.split("[")[0], value)
        if params["isa"] != best and not is_first:
            found.append(item)
    return found


def _turn(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    long = ["demo", "server", "shadow"]
    named = {item.path.parent.name, *(() if group is None else group.args)}
    return next((turn for turn, name in enumerate(long) if name in named), len(long))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral checkpoint; tests that change files make their own."""
    from tests.hf.tiny import save_tiny_checkpoint

    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> str:
    """The path of a tiny Mixtral, as a command's argument."""
    return str(checkpoint)


@pytest.fixture(scope="module")
def store() -> "HostStore":
    """A store of int8 experts; tests must not write to it."""
    from tests.experts.machines import make_store

    return make_store()


@pytest.fixture(scope="module")
def find_kernels() -> Iterator[Any]:
    """Return a function that finds the decode attention kernels, in Triton's interpreter."""
    pytest.importorskip("triton")
    from tests.kernels.interpreter import interpreted

    with interpreted():
        from tandem.triton_kernels.decode_attention import DecodeAttention

        yield lambda device: DecodeAttention(1)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a made-up machine's profile."""
    from tandem.hardware.profiles import save_profile
    from tests.experts.machines import make_machine

    path = tmp_path_factory.mktemp("profiles") / "made-up.json"
    save_profile(make_machine().profile, path)
    return str(path)


@pytest.fixture(scope="session", autouse=True)
def quiet_transformers() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

    logging.set_verbosity_error()
    logging.disable_progress_bar()
