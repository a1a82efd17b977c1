"""Tests that insufficient memory is refused before reading, with the plan's numbers."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import tandem
from tandem.cli.main import main
from tandem.core.errors import CapacityError
from tandem.core.units import format_bytes
from tandem.experts.store.host_memory import total_bytes
from tandem.forecast.sizes import model_sizes
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tests.hf.tiny import byte_tokenizer, save_tiny_checkpoint
from tests.inside import runtime_in
from tests.loading.checkpoints import FORMATS, write_plain, write_quantised
from tests.loading.gguf_files import tiny_model, write_gguf


def plain(directory: Path) -> Path:
    return save_tiny_checkpoint(directory / "plain")


def gptq(directory: Path) -> Path:
    fmt = FORMATS["gptq"]
    source = write_plain(directory / "source", fmt.architecture)
    return write_quantised(directory / "gptq", source, fmt)


def gguf(directory: Path) -> Path:
    return write_gguf(directory / "model.gguf", tiny_model(), "Q8_0")


@pytest.mark.parametrize(
    ("write", "dense_dtype"), [(plain, "none"), (gptq, "none"), (gguf, "none"), (gguf, "auto")]
)
def test_one_byte_less_than_the_plan_is_refused(
    write: Callable[[Path], Path],
    dense_dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = write(tmp_path)
    sizes = model_sizes(open_model(model), OffloadConfig(dense_dtype=dense_dtype))
    needed = sizes.experts_bytes + sizes.total_dense_bytes
    monkeypatch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: needed - 1)
    numbers = re.escape(
        f"take {format_bytes(needed)} of host memory and {format_bytes(needed - 1)} are free"
    )
    with pytest.raises(CapacityError, match=numbers):
        tandem.load(model, dense_dtype=dense_dtype)
    monkeypatch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: needed)
    loaded = tandem.load(model, dense_dtype=dense_dtype)
    assert len(runtime_in(loaded).store) == sizes.num_moe_layers


@pytest.fixture
def enormous(tmp_path: Path) -> Path:
    """A model of over 800 GB: a sparse file with a header only."""
    config = MixtralConfig(
        vocab_size=1024, hidden_size=8192, intermediate_size=32768, num_hidden_layers=64,
        num_attention_heads=64, num_key_value_heads=8, num_local_experts=8,
        architectures=["MixtralForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    directory = tmp_path / "enormous"
    config.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    header: dict[str, object] = {}
    end = 0
    for name, shape in stored_shapes(model).items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


def stored_shapes(model: MixtralForCausalLM) -> dict[str, list[int]]:
    """Return names and shapes of a Mixtral checkpoint's tensors, expert by expert."""
    shapes: dict[str, list[int]] = {}
    for name, tensor in model.state_dict().items():
        block, found, parameter = name.partition("mlp.experts.")
        if not found:
            shapes[name.replace("mlp.gate", "block_sparse_moe.gate")] = list(tensor.shape)
            continue
        num_experts, rows, cols = tensor.shape
        parts = {"w1": rows // 2, "w3": rows // 2} if "gate_up" in parameter else {"w2": rows}
        for expert in range(num_experts):
            for part, size in parts.items():
                shapes[f"{block}block_sparse_moe.experts.{expert}.{part}.weight"] = [size, cols]
    return shapes


@pytest.mark.skipif(total_bytes() > 400 << 30, reason="this machine would hold it")
def test_a_model_far_larger_than_this_machine(
    enormous: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is simulated; reading any of it first would end this process."""
    assert main(["plan", str(enormous), "--no-measure", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["fits"] is False
    needed = format_bytes(sum(report["parts_bytes"].values()))
    with pytest.raises(CapacityError, match=f"take {needed} of host memory and .* are free; close"):
        tandem.load(enormous)
    assert main(["run", str(enormous), "-p", "x", "--quiet"]) == 2
    assert f"take {needed} of host memory" in capsys.readouterr().err
