"""Tests of a model's runtime, and of the parts of every named device."""

import contextlib
import importlib
from pathlib import Path

import pytest
import torch

import tandem
from tandem.core.errors import CapacityError, ConfigError, ModelError
from tandem.devices import DEVICES, kind_of
from tandem.experts.execution.executor import CpuExecutor
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.load import load_checkpoint
from tandem.hf.packed_writer import FileSink
from tandem.hf.runtime import require_runtime, runtime_of
from tests.hf.tiny import save_tiny_checkpoint

SOURCE = Path(tandem.__file__).parent


@pytest.mark.seam
def test_a_models_runtime_is_found_until_and_after_it_is_closed(tmp_path: Path) -> None:
    model = tandem.load(save_tiny_checkpoint(tmp_path / "tiny"), threads=1)
    runtime = require_runtime(model)
    assert runtime_of(model) is runtime
    assert runtime.options.threads == 1
    assert isinstance(runtime.executor, CpuExecutor)
    before = runtime.executor
    with runtime.using(runtime.cpu_executor()):
        assert runtime.executor is not before
    assert runtime.executor is before
    runtime.require_open()
    model.close()
    assert len(runtime.store) == 0
    with pytest.raises(ConfigError, match="the model has been closed"):
        runtime.require_open()


def test_a_model_of_others_has_no_runtime() -> None:
    assert runtime_of(torch.nn.Linear(2, 2)) is None
    with pytest.raises(ModelError, match="Tandem did not load this Linear"):
        require_runtime(torch.nn.Linear(2, 2))


def test_nothing_is_found_by_way_of_transformers_own_attribute() -> None:
    files = SOURCE.rglob("*.py")
    assert not [path.name for path in files if "hf_quantizer" in path.read_text()]


@pytest.mark.seam
def test_a_load_leaves_nothing_on_the_users_options(tmp_path: Path) -> None:
    options = OffloadConfig(expert_dtype="int4")
    before = dict(vars(options))
    checkpoint = open_model(save_tiny_checkpoint(tmp_path / "tiny"))
    seen = list[dict[str, object]]()

    class Sink(FileSink):
        def begin(self, expected_bytes: int, table_bytes: int) -> None:
            seen.append(dict(vars(options)))
            super().begin(expected_bytes, table_bytes)

    with contextlib.closing(Sink(tmp_path, "", lambda *_: None)) as sink:
        load_checkpoint(checkpoint, options, sink=sink)
    assert seen == [before]
    assert vars(options) == before


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "cpu"])
def test_every_device_has_parts(name: str) -> None:
    assert callable(importlib.import_module(kind_of(name).machine).device_parts)


@pytest.mark.parametrize("name", DEVICES.names())
def test_a_device_says_its_memory_or_that_it_is_not_here(name: str) -> None:
    kind = kind_of(name)
    if name == "cuda" and not torch.cuda.is_available():
        with pytest.raises(CapacityError, match="device cpu"):
            kind.memory()
    else:
        memory = kind.memory()
        assert 0 < memory.free_bytes <= memory.total_bytes
