"""Tests of packed dense layers in models: accuracy, unpacked routers, saved weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tandem
from tandem.core.errors import ConfigError
from tandem.generate.generator import Generator
from tandem.hf.config import parse_dense_dtype
from tandem.hf.dense import pack_as_loaded, pack_dense_layers, packed_layers
from tandem.hf.dense_bytes import dense_bytes_with, packed_dense_bytes
from tandem.hf.dense_files import stored_tensors
from tandem.hf.packed_layers import PackedLinear
from tandem.kernels.dense import CpuThreads, DenseWeight, multiply, pack_dense
from tandem.kernels.formats.weight_format import find_format
from tests.architectures import build_tiny_model
from tests.decode.whole_pool import cpu_pool
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import logits_of, relative_error

pytestmark = pytest.mark.every_isa(first_of="name")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen2_moe", "qwen3_next"])
def test_packed_models_are_near_and_route_as_before(name: str, threads: CpuThreads) -> None:
    model: Any = build_tiny_model(name)
    before = logits_of(model)
    # fp16 rounds so little that no router flips
    assert pack_dense_layers(model, "fp16", threads) > 0
    kinds = {
        path.rpartition(".")[2] for path, m in model.named_modules() if isinstance(m, PackedLinear)
    }
    assert "lm_head" in kinds
    assert {"o_proj", "out_proj"} & kinds
    assert not {"gate", "router"} & kinds
    error = relative_error(logits_of(model), before)
    assert 0 < error < 0.005


def test_groups_of_rows_have_inputs_of_their_own(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("deepseek_v4")
    before, own = logits_of(model), model.model.layers[1].self_attn.o_a_proj
    assert pack_dense_layers(model, "fp16", threads) > 0
    packed = model.model.layers[1].self_attn.o_a_proj
    assert isinstance(packed, PackedLinear)
    assert len(packed.groups) == own.n_groups > 1
    x = torch.randn(2, 3, own.n_groups, own.in_features)
    torch.testing.assert_close(packed(x), own(x), rtol=1e-3, atol=1e-3)
    assert 0 < relative_error(logits_of(model), before) < 0.005


def test_layers_of_groups_are_saved_and_loaded(tmp_path: Path) -> None:
    plain = save_tiny_checkpoint(tmp_path / "plain", "deepseek_v4")
    model = tandem.load(plain, expert_dtype="int8", dense_dtype="int8", threads=1)
    again = tandem.load(tandem.save(model, tmp_path / "packed"), threads=1)
    for one in (model, again):
        layer = one.model.layers[0].self_attn.o_a_proj
        assert (type(layer), len(layer.groups)) == (PackedLinear, one.config.o_groups)
    assert torch.equal(logits_of(model), logits_of(again))


@pytest.mark.parametrize("dense_dtype", ["int8", "none"])
def test_the_bytes_of_dense_parts_are_known_before_they_are_packed(
    dense_dtype: str, threads: CpuThreads
) -> None:
    model: Any = build_tiny_model("qwen3_moe")
    expected = packed_dense_bytes(model, dense_dtype)
    pack_dense_layers(model, dense_dtype, threads)
    packed = sum(layer.packed.num_bytes for _, layer in packed_layers(model))
    assert expected == dense_bytes_with(model, {}) + packed


def test_int8_costs_percents(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_moe")
    before = logits_of(model)
    pack_dense_layers(model, "int8-g32", threads)
    error = relative_error(logits_of(model), before)
    assert 0.001 < error < 0.05


def test_replayed_steps_use_packed_layers_together(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_moe")
    pack_dense_layers(model, "int8-g32", threads)
    tokens = [50, 61, 72, 83, 94, 105]
    logits = []
    for has_replay in (True, False):
        pool = cpu_pool(model, threads, [[40, 41], [42]], has_replay=has_replay)
        pool.prefill()
        logits.append([pool.decode([token, token + 1]) for token in tokens])
        assert pool.step.is_replaying is has_replay
    for a, b in zip(*logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_packed_models_state_has_the_names_of_the_original(threads: CpuThreads) -> None:
    model, original = build_tiny_model("qwen3_moe"), build_tiny_model("qwen3_moe")
    pack_dense_layers(model, "int8-g32", threads)
    state, expected = model.state_dict(), original.state_dict()
    assert set(state) == set(expected)
    original.load_state_dict(state)
    error = relative_error(logits_of(original), logits_of(model))
    assert error < 0.05  # the same weights; here the activations are not rounded


def test_packed_models_generate(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("mixtral")
    pack_dense_layers(model, "bf16", threads)
    (answer,) = Generator(model, threads=threads).generate([40, 41, 42], max_new_tokens=5)
    assert answer.token_ids


def test_a_generators_threads_are_those_of_layers_packed_before(threads: CpuThreads) -> None:
    """Two sets of threads in one step would compete by polling for work."""
    model: Any = build_tiny_model("mixtral")
    pack_dense_layers(model, "bf16", CpuThreads(num_threads=1))
    Generator(model, threads=threads)
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert packed
    assert all(module.threads is threads for module in packed)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_packed_head_gives_logits_in_fp32(checkpoint: Path, dtype: str) -> None:
    model = tandem.load(
        checkpoint, dtype=dtype, expert_dtype="int8-g32", dense_dtype="int8-g32", threads=1
    )
    hidden: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    logits = logits_of(model)
    assert logits.dtype == torch.float32
    assert hidden[0].dtype == model.dtype
    (head,) = (x for name, x in packed_layers(model) if name == "lm_head")
    (expected,) = multiply(head.threads, [head.packed], hidden[0].float())
    assert torch.equal(logits, expected)


def test_an_unknown_dense_dtype_gets_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"dense_dtype is 'int9'.*did you mean"):
        parse_dense_dtype("int9")


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss"])  # gpt_oss: layers with biases
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", request.param)


def test_a_model_is_loaded_with_packed_layers(checkpoint: Path) -> None:
    loaded = tandem.load(checkpoint, expert_dtype="int8", dense_dtype="int8-g32", threads=1)
    later = tandem.load(checkpoint, expert_dtype="int8", threads=1)
    Generator(later, dense_dtype="int8-g32")
    assert len(list(packed_layers(loaded))) > 4
    torch.testing.assert_close(logits_of(loaded), logits_of(later), rtol=0, atol=0)


def test_from_pretrained_takes_a_dense_dtype(checkpoint: Path) -> None:
    config = tandem.OffloadConfig(expert_dtype="int4", dense_dtype="auto", threads=1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config)
    assert {x.packed.matrix.format.name for _, x in packed_layers(model)} == {"int8-g32"}


@pytest.mark.parametrize("dense_dtype", ["int4", "bf16"])
def test_a_saved_model_keeps_its_packed_layers(
    checkpoint: Path, tmp_path: Path, dense_dtype: str
) -> None:
    model = tandem.load(checkpoint, expert_dtype="int8", dense_dtype=dense_dtype, threads=1)
    directory = tandem.save(model, tmp_path / "packed")
    for again in (
        tandem.load(directory, threads=1),
        tandem.load(directory, dense_dtype=dense_dtype),
        AutoModelForCausalLM.from_pretrained(directory),
    ):
        assert len(list(packed_layers(again))) == len(list(packed_layers(model)))
        torch.testing.assert_close(logits_of(again), logits_of(model), rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"is packed with dense_dtype .* original"):
        tandem.load(directory, dense_dtype="int8-g64")


def test_packed_layers_are_written_from_where_they_lie(checkpoint: Path) -> None:
    """Copying all of them at once would take gigabytes."""
    model = tandem.load(checkpoint, expert_dtype="int8", dense_dtype="int8", threads=1)
    lie = {layer.packed.matrix.data.data_ptr() for _, layer in packed_layers(model)}
    assert {parts[0].data_ptr() for parts in stored_tensors(model).values()} == lie


def test_a_head_that_is_tied_to_the_embeddings_is_packed_alone(tmp_path: Path) -> None:
    model: Any = build_tiny_model("qwen3_moe")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    packed = tandem.load(tmp_path / "tied", expert_dtype="int8", dense_dtype="int8", threads=1)
    packed.tie_weights()  # as lm-eval does with every model: nothing is left to tie
    again = tandem.load(tandem.save(packed, tmp_path / "packed"), threads=1)
    assert isinstance(again.lm_head, PackedLinear)
    torch.testing.assert_close(logits_of(again), logits_of(packed), rtol=0, atol=0)


def test_layers_of_several_formats_are_saved(checkpoint: Path, tmp_path: Path) -> None:
    model = tandem.load(checkpoint, expert_dtype="int8", dense_dtype="int8", threads=1)
    layer = next(layer for _, layer in packed_layers(model))
    layer.packed = pack_dense(layer.weight, layer.bias, find_format("int4"))
    again = tandem.load(tandem.save(model, tmp_path / "packed"), threads=1)
    formats = [{p: x.packed.matrix.format for p, x in packed_layers(m)} for m in (model, again)]
    assert formats[0] == formats[1]
    assert len(set(formats[0].values())) == 2
    torch.testing.assert_close(logits_of(again), logits_of(model), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layers_packed_as_loaded_keep_every_weight(dtype: torch.dtype, threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_moe").to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    num_bytes = pack_as_loaded(model, threads)
    assert (num_bytes > 0) == (dtype != torch.float32), "fp32 has no packed format of its own"
    assert bool(list(packed_layers(model))) == (dtype != torch.float32)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_row_packed_as_loaded_is_alike_in_any_batch(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_moe").to(torch.bfloat16)
    pack_as_loaded(model, threads)
    for _, layer in packed_layers(model):
        x = torch.randn((9, layer.in_features), generator=torch.Generator().manual_seed(1))
        together = layer(x.bfloat16())
        for i in range(9):
            assert torch.equal(layer(x[i : i + 1].bfloat16())[0], together[i])


def test_a_packed_weight_is_unpacked_for_those_who_read_it(
    threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(24, 16)
    layer = PackedLinear(pack_dense(weight, None, find_format("bf16")), threads, torch.float32)
    with monkeypatch.context() as patched:
        patched.delattr(DenseWeight, "values")
        assert layer.weight.dtype == torch.float32
        assert layer.weight.shape == (24, 16)
    assert torch.equal(layer.weight.detach(), weight.bfloat16().float())
