"""Tests that a deleted model leaves nothing behind: memory and threads are released."""

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import tandem
import tests.threaded  # noqa: F401  makes the device known
from tandem.core.errors import ConfigError
from tests.inside import runtime_in

IDS = torch.tensor([[20, 21, 22, 23]])
EXPERTS_MB = 12
EMULATED: dict[str, Any] = {"device": "emulated", "gpu_memory": "50%", "profile": "laptop-8gb"}
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "emulated": EMULATED,
    "threaded": {**EMULATED, "device": "threaded"},
}


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of mostly experts: ten of them are 120 MB or more."""
    directory = tmp_path_factory.mktemp("models") / "heavy"
    config = MixtralConfig(
        vocab_size=64, hidden_size=256, intermediate_size=1024, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
    )  # fmt: skip
    MixtralForCausalLM(config).bfloat16().save_pretrained(directory)
    return directory


def own_bytes() -> int:
    """Return the process's private memory in bytes, without mapped files."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x]
    return int(line.split()[1]) * 1024


def answer(model: Any) -> None:
    """Run a model in both ways: Transformers' loop, and a recorded step of Tandem."""
    model.generate(IDS, max_new_tokens=2, pad_token_id=0)
    tandem.Generator(model).generate(IDS[0], max_new_tokens=8, temperature=0)


def native_threads() -> int:
    """Return the system's threads, which may include one that has just been joined."""
    return len(list(Path("/proc/self/task").iterdir()))


def repeat(times: int, work: Callable[[], None]) -> int:
    """Return by how many bytes the process grows when a function is repeated."""
    work()  # objects that are imported and kept at first use
    gc.collect()
    gc.freeze()  # garbage is looked for among new objects only: ten times as fast
    before, native, num_threads = own_bytes(), native_threads(), threading.active_count()
    try:
        for _ in range(times):
            work()
            gc.collect()
        assert threading.active_count() == num_threads
        assert native_threads() < native + times
        return own_bytes() - before
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("device", DEVICES)
def test_ten_models_in_turn_take_the_memory_and_the_threads_of_one(
    heavy: Path, tmp_path: Path, device: str
) -> None:
    def use_one() -> None:
        model = tandem.load(heavy, cache_dir=str(tmp_path), **DEVICES[device])
        answer(model)

    assert repeat(10, use_one) < 50 << 20


@pytest.mark.seam
@pytest.mark.parametrize(
    ("expert_dtype", "device", "look_ahead"),
    [("auto", "threaded", False), ("int8", "emulated", False), ("int8", "threaded", True)],
)
def test_nothing_holds_a_model_that_nobody_holds(
    checkpoint: Path, tmp_path: Path, expert_dtype: str, device: str, look_ahead: bool
) -> None:
    options = {**DEVICES[device], "expert_dtype": expert_dtype, "look_ahead": look_ahead}
    model = tandem.load(checkpoint, dtype="float32", cache_dir=str(tmp_path), **options)
    answer(model)
    runtime = runtime_in(model)
    parts = (model, runtime, runtime.executor, runtime.store)
    alive = [weakref.ref(part) for part in parts]
    del model, runtime, parts
    gc.collect()
    assert [part() for part in alive] == [None] * len(alive)


@pytest.mark.parametrize("device", DEVICES)
def test_experts_go_with_the_model_not_with_the_next_collection(
    checkpoint: Path, tmp_path: Path, device: str
) -> None:
    model = tandem.load(checkpoint, expert_dtype="int8", cache_dir=str(tmp_path), **DEVICES[device])
    answer(model)
    store = weakref.ref(runtime_in(model).store)
    gc.collect()
    gc.disable()
    try:
        del model
        assert store() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("device", ["cpu", "threaded"])
def test_a_closed_model_has_given_everything_back(heavy: Path, tmp_path: Path, device: str) -> None:
    kept = []  # as in a notebook, where every name stays alive

    def use_one() -> None:
        model = tandem.load(heavy, cache_dir=str(tmp_path), **DEVICES[device])
        with closing(model):
            answer(model)
        kept.append(model)

    assert repeat(4, use_one) < 2 * EXPERTS_MB << 20


@pytest.mark.seam
def test_a_closed_model_says_so(checkpoint: Path, tmp_path: Path) -> None:
    config = tandem.OffloadConfig(cache_dir=str(tmp_path))
    with AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config) as model:
        generator = tandem.Generator(model)
        generator.generate(IDS[0], max_new_tokens=8)
    model.close()  # a second close is no error
    for ask in (lambda: model(IDS), lambda: generator.generate(IDS[0], max_new_tokens=8)):
        with pytest.raises(ConfigError, match="the model has been closed; load it again"):
            ask()
    with pytest.raises(ConfigError, match="the model has been closed"):
        tandem.save(model, tmp_path / "packed")
