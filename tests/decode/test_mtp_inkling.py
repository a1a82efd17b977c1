"""Tests of Inkling's MTP layers, in its checkpoints' layout, against Transformers' layers.

The layer's input has hidden states first, then embeddings without the model's norm. The head reads
the layer's output, with or without a final norm.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tandem
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.mtp.loading import load_mtp
from tandem.generate.generator import Generator
from tandem.generate.speculation.drafters import DRAFTERS, DraftParts
from tandem.generate.speculation.mtp import MtpDrafter
from tests.architectures import build_tiny_model
from tests.conftest import two_threads
from tests.hf.tiny import byte_tokenizer

IDS = [40, 41, 50, 60, 33, 90, 91, 77, 40, 41]
NUM_LAYERS = 2
# Of a decoder layer, as released checkpoints name it.
RELEASED = {
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "mlp_norm.",
    "self_attn.q_proj.": "attn.wq_du.",
    "self_attn.k_proj.": "attn.wk_dv.",
    "self_attn.v_proj.": "attn.wv_dv.",
    "self_attn.r_proj.": "attn.wr_du.",
    "self_attn.o_proj.": "attn.wo_ud.",
    "sconv.conv1d.": "sconv.",
    "self_attn.": "attn.",
    "mlp.down_proj.": "mlp.w2_md.",
}
JOINING = {
    "eh_proj.": "input_proj.",
    "enorm.": "embed_norm.",
    "hnorm.": "hidden_norm.",
    "mtp_block.": "transformer_block.",
    "shared_post_norm.": "chain_norm.",
}


class WithMtp:
    """A directory with a tiny model and two MTP layers, and the same layers in Transformers."""

    def __init__(self, directory: Path, *, is_normed: bool) -> None:
        from transformers.modeling_layers import MtpModel  # the oldest supported has none

        values = {
            "num_mtp_layers": NUM_LAYERS,
            "mtp_local_layer_ids": [1],
            "chain_hidden_post_norm": is_normed,
        }
        self.model: Any = build_tiny_model("inkling", values=values)
        self.mtp: Any = MtpModel(self.model, NUM_LAYERS).train(False)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            for name, weight in self.mtp.named_parameters():
                if name.startswith(("layers.", "shared_post_norm.")):
                    is_scale = weight.dim() == 1
                    torch.nn.init.normal_(weight, 1.0 if is_scale else 0.0, 0.1)
        self.model.save_pretrained(directory)
        byte_tokenizer().save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        save_file(tensors | self._released(), directory / "model.safetensors", {"format": "pt"})

    def _released(self) -> dict[str, Tensor]:
        own = {
            name: weight.detach().clone()
            for name, weight in self.mtp.named_parameters()
            if name.startswith(("layers.", "shared_post_norm."))
        }
        for depth in range(NUM_LAYERS):
            mlp = f"layers.{depth}.mtp_block.mlp."
            both = [own.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
            own[f"{mlp}w13_dn.weight"] = torch.stack(both, 1).flatten(0, 1)
        return {f"model.mtp.{_released_name(name)}": weight for name, weight in own.items()}

    @torch.no_grad()
    def made(self, depth: int, ids: list[int], hidden: Tensor) -> Tensor:
        """Return a layer's output for ids and the previous layer's output, (n, width).

        Transformers' masks are not used: 5.24 ignores these layers' window in prompts.
        """
        config, places = self.mtp.config, torch.arange(len(ids))
        distance = places[:, None] - places
        is_sliding = config.layer_types[depth] == "hybrid_sliding"
        window = config.sliding_window_size if is_sliding else len(ids)
        mask = torch.where((distance >= 0) & (distance < window), 0.0, -torch.inf)
        made: Tensor = self.mtp.layers[depth](
            self.mtp.embed_tokens(torch.tensor([ids])), hidden[None], position_embeddings=None,
            attention_mask=mask[None, None], position_ids=None, cache=None, conv_mask=None,
        )  # fmt: skip
        return self.mtp.shared_post_norm(made)[0] if self.mtp.use_shared_post_norm else made[0]

    @torch.no_grad()
    def logits(self, made: Tensor) -> Tensor:
        """Return the head's logits of a layer's output."""
        logits: Tensor = self.mtp._project_to_logits(made)
        return logits

    @torch.no_grad()
    def draft(self, tokens: list[int]) -> list[int]:
        """Return the token that each layer drafts after a sequence."""
        drafted: list[int] = []
        hidden = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        for depth in range(NUM_LAYERS):
            hidden = self.made(depth, [*tokens, *drafted][1 + depth :], hidden)
            drafted.append(int(self.logits(hidden[-1]).argmax()))
        return drafted


def _released_name(name: str) -> str:
    for table in (JOINING, RELEASED):
        for own, released in table.items():
            name = name.replace(own, released)
    return name


@pytest.mark.parametrize("is_normed", [False, True])
def test_layers_give_what_transformers_gives(tmp_path: Path, is_normed: bool) -> None:
    made = WithMtp(tmp_path, is_normed=is_normed)
    model = tandem.load(tmp_path, dtype="float32", threads=1)
    layers = load_mtp(model)
    assert len(layers) == NUM_LAYERS
    for depth, (head, embedding) in enumerate(layers):
        hidden = torch.randn(len(IDS), model.config.hidden_size)
        expected = made.made(depth, IDS, hidden)
        pool = CpuSlotPool(head, two_threads(), 1, notes_hidden=True, inputs=embedding.fixed)
        embedding.give(hidden[:6])
        logits, found = [pool.prefill_with_logits(0, IDS[:6]).clone()], []
        for at in (6, 7, 8, 9):  # the last one from the recorded step
            embedding.give(hidden[at : at + 1])
            logits.append(pool.verify({0: IDS[at : at + 1]}).clone())
            assert pool.hidden is not None
            found.append(pool.hidden.clone())
        assert pool.step.is_replaying, pool.step.why_not
        pairs = (torch.cat(logits), made.logits(expected)), (torch.cat(found), expected[6:])
        for ours, theirs in pairs:
            assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_drafts_are_those_of_transformers(tmp_path: Path) -> None:
    made = WithMtp(tmp_path, is_normed=False)
    model = tandem.load(tmp_path, dtype="float32", threads=1)
    threads = two_threads()
    drafter = DRAFTERS.factory("mtp")(DraftParts(model=model, threads=threads))
    assert isinstance(drafter, MtpDrafter)
    pool = CpuSlotPool(model, threads, 1, notes_hidden=True)
    drafter.follow(pool)
    pool.prefill({0: IDS})
    text = [*IDS]
    for kept in (0, 2, 1):
        text.append(50 + kept)
        found = list(drafter.draft({0: text}, {0: 3}, 0.0)[0].tokens)
        assert found[:NUM_LAYERS] == made.draft(text)
        pool.verify({0: [text[-1], *found]})
        pool.keep(0, len(text) + kept)
        text = [*pool.held(0)]


def test_answers_with_them_are_those_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.policy.speculation.paid_drafts._TRIALS", 10**6)  # each step drafts
    WithMtp(tmp_path, is_normed=False)
    model = tandem.load(
        tmp_path, dtype="bfloat16", expert_dtype="int8-g32", dense_dtype="int8-g32", threads=1
    )
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.7, "seed": 2}
    (expected,) = Generator(model, speculate="none").generate([IDS], **options)
    (answer,) = Generator(model, speculate="mtp").generate([IDS], **options)
    assert answer.token_ids == expected.token_ids
    assert answer.drafted_tokens > 0
