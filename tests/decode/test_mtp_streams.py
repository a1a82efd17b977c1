"""Tests of DeepSeek-V4's MTP layer, which reads all residual streams, against plain torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tandem
from tandem.core.errors import UnsupportedModelError
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.decode.mtp.loading import load_mtp
from tandem.decode.mtp.names import mtp_names
from tandem.generate.generator import Generator
from tandem.generate.speculation.drafters import DRAFTERS, DraftParts
from tandem.generate.speculation.mtp import MtpDrafter
from tandem.hf.dense import packed_layers
from tests.conftest import two_threads
from tests.decode.twin_capture import TwinCapture
from tests.inside import relative_error
from tests.loading.deepseek_v4 import (
    CONFIG,
    NUM_LAYERS,
    released_tensors,
    tiny_model,
    write_decoded,
    write_released,
)

IDS = [40, 41, 50, 60, 33, 90, 91, 77, 40, 41, 52, 53, 99]
RATIOS = {"sliding": 0, "sparse": 4, "heavy": 128}


class Reference:
    """Transformers' layers, and the MTP layer in plain torch, in fp32."""

    def __init__(self, decoded: Path) -> None:
        """Read a released checkpoint's weights: its MTP layer is the last of the model's layers."""
        directory = decoded.parent / f"{decoded.name}-longer"
        tensors = load_file(decoded / "model.safetensors")
        self.parts = {
            name.removeprefix("mtp.0."): tensor
            for name, tensor in tensors.items()
            if name.startswith("mtp.0.")
        }
        directory.mkdir()
        of_layer = {
            name.replace("mtp.0.", f"layers.{NUM_LAYERS}."): x for name, x in tensors.items()
        }
        save_file(of_layer, directory / "model.safetensors", {"format": "pt"})
        config = json.loads((decoded / "config.json").read_text())
        config["num_hidden_layers"] = NUM_LAYERS + 1
        (directory / "config.json").write_text(json.dumps(config))
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.layer = self.model.model.layers[NUM_LAYERS]
        self.model.model.layers = self.model.model.layers[:NUM_LAYERS]

    @torch.no_grad()
    def streams(self, ids: list[int]) -> Tensor:
        """Return the model's residual streams after each id, (n, streams, width)."""
        made: list[Tensor] = []
        last = self.model.model.layers[-1]
        hook = last.register_forward_hook(lambda _, args, out: made.append(out[0]))
        self.model(torch.tensor([ids]), use_cache=False)
        hook.remove()
        return made[0]

    @torch.no_grad()
    def made(self, ids: list[int], streams: Tensor) -> Tensor:
        """Return the MTP layer's streams for ids, each with the previous token's streams."""
        config, decoder = self.model.config, self.model.model
        e = self._normed(decoder.embed_tokens(torch.tensor(ids)), "enorm") @ self._matrix("e_proj")
        x = e[:, None] + self._normed(streams, "hnorm") @ self._matrix("h_proj")
        positions = torch.arange(len(ids))[None]
        turns = {
            kind: decoder.rotary_emb(x[None], position_ids=positions, layer_type=kind)
            for kind in ("main", "compress")
        }
        distance = positions.T - positions
        is_seen = (distance >= 0) & (distance < config.sliding_window)
        mask = torch.where(is_seen, 0.0, -torch.inf)[None, None]
        out: Tensor = self.layer(
            x[None], input_ids=torch.tensor([ids]), position_embeddings=turns,
            position_ids=positions, attention_mask=mask, cache=None,
        )  # fmt: skip
        return out[0]

    @torch.no_grad()
    def logits(self, made: Tensor) -> Tensor:
        """Return the logits of a layer's streams."""
        scale, base = self.parts["hc_head_scale"], self.parts["hc_head_base"]
        flat = made.flatten(1)
        flat = (
            flat * flat.square().mean(-1, keepdim=True).add(self.model.config.rms_norm_eps).rsqrt()
        )
        share = (
            torch.sigmoid(flat @ self.parts["hc_head_fn"].T * scale + base)
            + self.model.config.hc_eps
        )
        mixed = (share[..., None] * made).sum(1)
        logits: Tensor = self.model.lm_head(self._normed(mixed, "norm"))
        return logits

    def _normed(self, x: Tensor, name: str) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(self.model.config.rms_norm_eps).rsqrt()
        return x * scale * self.parts[f"{name}.weight"]

    def _matrix(self, name: str) -> Tensor:
        return self.parts[f"{name}.weight"].T


def write(directory: Path, kind: str = "sliding") -> tuple[Path, Path]:
    """Write a released checkpoint with one kind of MTP attention; return its decoded weights."""
    ratios = [*CONFIG["compress_ratios"][:-1], RATIOS[kind]]
    config = CONFIG | {"compress_ratios": ratios}
    tensors = released_tensors(directory / "model", tiny_model(config))
    released = write_released(directory / "released", tensors, compress_ratios=ratios)
    return released, write_decoded(directory / "decoded", released)


@pytest.mark.parametrize("kind", RATIOS)
def test_the_layer_gives_what_torch_gives(kind: str, tmp_path: Path) -> None:
    _, decoded = write(tmp_path, kind)
    reference = Reference(decoded)
    ((head, embedding),) = load_mtp(tandem.load(decoded, dtype="float32", threads=1))
    streams = torch.randn(len(IDS), CONFIG["hc_mult"], CONFIG["hidden_size"])
    made = reference.made(IDS, streams)
    expected = reference.logits(made)
    pool = CpuSlotPool(head, two_threads(), 1, notes_hidden=True, inputs=embedding.fixed)
    given = streams.flatten(1)
    embedding.give(given[:8])
    found = [pool.prefill_with_logits(0, IDS[:8]).clone()]
    for at in range(8, len(IDS)):  # the last ones from the recorded step
        embedding.give(given[at : at + 1])
        found.append(pool.verify({0: IDS[at : at + 1]}).clone())
        assert pool.hidden is not None
        assert relative_error(pool.hidden[0], made[at].flatten()) < 1e-5
    assert pool.step.is_replaying, pool.step.why_not
    assert relative_error(torch.cat(found), expected) < 1e-5


def cpu_pool(model: Any) -> CpuSlotPool:
    return CpuSlotPool(model, two_threads(), 1, notes_hidden=True)


def twin_pool(model: Any) -> CudaSlotPool:
    return CudaSlotPool(model, 1, make_capture=TwinCapture, notes_hidden=True)


@pytest.mark.parametrize("new_pool", [cpu_pool, twin_pool])
def test_it_drafts_what_torch_drafts(new_pool: Any, tmp_path: Path) -> None:
    """Later drafts are computed from the layer's own output streams."""
    _, decoded = write(tmp_path)
    reference = Reference(decoded)
    model = tandem.load(decoded, dtype="float32", threads=1)
    drafter = DRAFTERS.factory("mtp")(DraftParts(model=model, threads=two_threads()))
    assert isinstance(drafter, MtpDrafter)
    pool = new_pool(model)
    drafter.follow(pool)
    pool.prefill({0: IDS})
    text = list(IDS)
    for kept, most in ((1, 3), (0, 2), (2, 3), (1, 2), (3, 3)):  # two: a row of four is idle
        text.append(44 + kept)
        expected, ids, streams = [], text[1:], reference.streams(text[:-1])
        for _ in range(most):
            made = reference.made(ids, streams)
            expected.append(int(reference.logits(made)[-1].argmax()))
            ids, streams = [*ids, expected[-1]], torch.cat([streams, made[-1:]])
        found = list(drafter.draft({0: text}, {0: most}, 0.0)[0].tokens)
        assert found == expected
        pool.verify({0: [text[-1], *found]})
        pool.keep(0, len(text) + kept)
        text = [*pool.held(0)]
    assert pool.step.is_replaying, pool.step.why_not


def test_answers_of_the_release_are_those_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.policy.speculation.paid_drafts._TRIALS", 10**6)  # each step drafts
    released, _ = write(tmp_path)
    model = tandem.load(released, dense_dtype="auto", threads=1)
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.7, "seed": 2}
    prompts = [IDS, [33, 70, 71] * 20, [70, 71]]
    expected = Generator(model, speculate="none").generate(prompts, **options)
    answers = Generator(model, speculate="mtp").generate(prompts, **options)
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
    assert sum(answer.drafted_tokens for answer in answers) > 0
    ((head, _),) = load_mtp(model)
    assert not any(isinstance(module, nn.Linear) for module in head.modules())
    formats = {layer.packed.matrix.format.name for _, layer in packed_layers(head)}
    assert "fp8" in formats


def test_a_layout_that_drafts_blocks_is_named(tmp_path: Path) -> None:
    released, _ = write(tmp_path)
    tensors = load_file(released / "model.safetensors")
    parts = ("mtp.0.e_proj", "mtp.0.h_proj")
    without = {name: x for name, x in tensors.items() if not name.startswith(parts)}
    without["mtp.0.main_proj.weight"] = torch.ones(4, 4)
    save_file(without, released / "model.safetensors", {"format": "pt"})
    model = tandem.load(released, threads=1)
    with pytest.raises(UnsupportedModelError, match="in DSpark's layout, which drafts a block"):
        load_mtp(model)


def test_layouts() -> None:
    joining = ["e_proj.weight", "h_proj.weight", "enorm.weight", "hnorm.weight", "norm.weight"]
    names = [f"mtp.0.{part}" for part in [*joining, "hc_head_fn", "attn.wq_a.weight"]]
    (found,) = mtp_names(names, 43)
    assert found["mtp.0.attn.wq_a.weight"] == "model.layers.0.attn.wq_a.weight"
    assert found["mtp.0.hc_head_fn"] == "model.hc_head.hc_fn"
    assert {found[f"mtp.0.{part}"] for part in joining} == set(joining)
    assert mtp_names(names[1:], 43) == []
    assert len(mtp_names([*names, *(name.replace(".0.", ".1.") for name in names)], 43)) == 2
