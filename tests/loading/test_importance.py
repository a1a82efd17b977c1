"""Tests of importance: its files, experts with few tokens, and rounding with it."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

import tandem
from tandem.checkpoint.importance import open_importance, save_importance
from tandem.checkpoint.input_squares import InputSquares, importance_of
from tandem.core.errors import ConfigError, FileFormatError
from tandem.hf.checkpoint import open_model
from tandem.hf.importance import kept_importance
from tandem.hf.runtime import require_runtime
from tandem.kernels.formats import find_format, pack, unpack
from tests.hf.tiny import save_tiny_checkpoint, save_tiny_dense

EXPERTS = "model.layers.1.mlp.experts"
NUM, HIDDEN, INNER = 4, 32, 64
Squares = dict[str, InputSquares]


def some(seed: int = 0, hidden: int = HIDDEN, inner: int = INNER, num: int = NUM) -> Squares:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.full((num,), 1 << 22)
    return {
        f"{EXPERTS}.gate_up_proj": InputSquares(torch.rand(num, hidden, generator=random), tokens),
        f"{EXPERTS}.down_proj": InputSquares(torch.rand(num, inner, generator=random), tokens),
        "model.layers.1.self_attn.q_proj.weight": InputSquares(
            torch.rand(1, hidden, generator=random), tokens[:1]
        ),
    }


def write_gguf(path: Path, squares: Squares) -> Path:
    """Write an imatrix with llama.cpp's names."""
    writer = GGUFWriter(path, arch="")
    writer.add_type("imatrix")
    for name, (mean, tokens) in by_their_names(squares).items():
        sums = (mean * tokens[:, None]).numpy().astype(np.float32)
        writer.add_tensor(f"{name}.in_sum2", sums)
        writer.add_tensor(f"{name}.counts", tokens.numpy().astype(np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_dat(path: Path, squares: Squares) -> Path:
    """Write an imatrix in the old form, which stores means multiplied by the number of calls."""
    entries = by_their_names(squares)
    content = struct.pack("<i", len(entries))
    for name, (mean, tokens) in entries.items():
        kept = torch.where(tokens[:, None] > 0, mean, 1.0) * 7
        content += struct.pack("<i", len(name)) + name.encode()
        content += struct.pack("<ii", 7, mean.numel()) + kept.numpy().astype("<f4").tobytes()
    path.write_bytes(content + struct.pack("<ii", 7, 4) + b"text")
    return path


def by_their_names(squares: Squares) -> Squares:
    up, down, dense = squares.values()
    return {
        "blk.1.ffn_gate_exps.weight": up, "blk.1.ffn_up_exps.weight": up,
        "blk.1.ffn_down_exps.weight": down, "blk.1.attn_q.weight": dense,
    }  # fmt: skip


def write_own(path: Path, squares: Squares) -> Path:
    save_importance(path, squares)
    return path


@pytest.mark.parametrize("write", [write_own, write_gguf, write_dat])
def test_every_form_of_file_gives_the_same(tmp_path: Path, write: object) -> None:
    assert callable(write)
    squares = some()
    squares[f"{EXPERTS}.gate_up_proj"].tokens[2] = 0
    squares[f"{EXPERTS}.gate_up_proj"].mean_square[2] = 0
    importance = open_importance(write(tmp_path / "file", squares))
    for name, found in squares.items():
        expected = importance_of(found, are_inner=name.endswith(".down_proj"))
        num, cols = found.mean_square.shape
        weighed = importance.of(name, (num, cols))
        assert weighed is not None
        torch.testing.assert_close(weighed, expected, rtol=1e-3, atol=1e-4)
    assert importance.of("model.layers.0.mlp.experts.down_proj", (NUM, INNER)) is None
    with pytest.raises(ConfigError, match="give the importance of this model"):
        importance.of(f"{EXPERTS}.down_proj", (NUM + 1, INNER))


def test_few_tokens_count_as_much_as_their_number() -> None:
    squares = torch.tensor([[1.0, 9.0], [9.0, 1.0], [0.0, 0.0]])
    tokens = torch.tensor([1 << 24, 8, 0])
    of_inputs = importance_of(InputSquares(squares, tokens), are_inner=False)
    torch.testing.assert_close(of_inputs[0], torch.tensor([0.5, 1.5]))
    torch.testing.assert_close(of_inputs[1], _roots(2.6, 7.4))  # a fifth its own
    torch.testing.assert_close(of_inputs[2], of_inputs[0])  # the layer's
    inner = importance_of(InputSquares(squares, tokens), are_inner=True)
    torch.testing.assert_close(inner[1], _roots(5.8, 4.2))  # channels of its own
    torch.testing.assert_close(inner[2], torch.ones(2))
    nothing = importance_of(InputSquares(torch.zeros(1, 2), torch.tensor([0])), are_inner=False)
    torch.testing.assert_close(nothing, torch.ones(1, 2))


def _roots(*squares: float) -> torch.Tensor:
    roots = torch.tensor(squares).sqrt()
    return roots / roots.mean()


def test_what_is_no_importance_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(FileFormatError, match="has no importance"):
        open_importance(path)
    for damaged in (b"", b"no importance at all", write_dat(path, some()).read_bytes()[:-900]):
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match="not an importance file, or is damaged"):
            open_importance(path)
    path.write_bytes(write_gguf(path, some()).read_bytes()[:-900])
    with pytest.raises(FileFormatError, match="cannot be read as GGUF"):
        open_importance(path)


def test_experts_and_linear_layers_are_rounded_by_it(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny")
    plain = tandem.load(checkpoint, dtype="float32")
    host = require_runtime(plain).store[1]
    num, hidden = host.arrivals.num_experts, plain.config.hidden_size
    inner = host.weights(0).down.shape[1]
    squares = some(hidden=hidden, inner=inner, num=num)
    file = write_own(tmp_path / "importance", squares)
    options: dict[str, Any] = {
        "expert_dtype": "int4",
        "dense_dtype": "int4",
        "importance": str(file),
    }
    weighed = tandem.load(checkpoint, dtype="float32", **options)
    fmt, importance = find_format("int4"), open_importance(file)
    of_up, of_down = (
        importance.of(f"{EXPERTS}.{name}", shape)
        for name, shape in (("gate_up_proj", (num, hidden)), ("down_proj", (num, inner)))
    )
    assert of_up is not None
    assert of_down is not None
    for layer in (0, 1):  # nothing is known of the first
        whole, rounded = (require_runtime(m).store[layer].weights(3) for m in (plain, weighed))
        up = pack(whole.up, fmt, importance=of_up[3] if layer else None)
        down = pack(whole.down, fmt, importance=of_down[3] if layer else None)
        torch.testing.assert_close(rounded.up, unpack(up), rtol=0, atol=0)
        torch.testing.assert_close(rounded.down, unpack(down), rtol=0, atol=0)
        linear, of_plain = (m.model.layers[layer].self_attn.q_proj for m in (weighed, plain))
        own = importance.of("model.layers.1.self_attn.q_proj.weight", (1, hidden))
        assert own is not None
        packed = pack(of_plain.weight, fmt, importance=own[0] if layer else None)
        torch.testing.assert_close(linear.values(), unpack(packed), rtol=0, atol=0)
    assert "importance" not in weighed.config.quantization_config.to_dict()

    tandem.pack(checkpoint, tmp_path / "packed", **options)
    packed_model = tandem.load(tmp_path / "packed", dtype="float32")
    same = (require_runtime(m).store[1].weights(3).down for m in (packed_model, weighed))
    torch.testing.assert_close(*same, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="its weights are rounded already"):
        tandem.load(tmp_path / "packed", importance=str(file))


def test_what_was_kept_is_found(tmp_path: Path) -> None:
    dense = save_tiny_dense(tmp_path / "dense")
    options: dict[str, Any] = {
        "dense_dtype": "int4",
        "importance": "auto",
        "cache_dir": str(tmp_path),
    }
    with pytest.raises(ConfigError, match=r"collect it first: tandem importance .*dense"):
        tandem.load(dense, **options)
    file = kept_importance(open_model(dense), tmp_path)
    file.parent.mkdir()
    linear = tandem.load(dense, dtype="float32").model.layers[1].self_attn.q_proj
    name = "model.layers.1.self_attn.q_proj.weight"
    squares = InputSquares(torch.rand(1, linear.in_features), torch.tensor([1 << 22]))
    save_importance(file, {name: squares})
    found = tandem.load(dense, dtype="float32", **options).model.layers[1].self_attn.q_proj.values()
    assert not torch.equal(found, unpack(pack(linear.weight, find_format("int4"))))

    save_importance(file, {"another.weight": squares})
    with pytest.raises(ConfigError, match="has no matrix of this model"):
        tandem.load(dense, **options)
    with pytest.raises(ConfigError, match="importance is '/no/such', which is not a file"):
        tandem.load(dense, importance="/no/such")
