"""Tests of MTP layers: found in a checkpoint, computed as by torch, and used to draft."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tandem
from tandem.core.errors import TandemWarning, UnsupportedModelError
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.decode.mtp.loading import first_rows, load_mtp
from tandem.decode.mtp.names import mtp_names
from tandem.generate.generator import Generator
from tandem.generate.speculation.drafters import DRAFTERS, DraftParts
from tandem.generate.speculation.mtp import MtpDrafter
from tandem.hf.packed_layers import PackedLinear
from tandem.kernels.dense import pack_dense
from tandem.kernels.formats.weight_format import find_format
from tests.architectures import build_tiny_model
from tests.conftest import two_threads
from tests.decode.twin_capture import TwinCapture
from tests.hf.tiny import byte_tokenizer

# Names beside the layer, and where the layer is, by architecture.
NUMBERED = ("model.layers.{}.", {"fc": "eh_proj", "norm": "shared_head.norm"})
UNDER = ("mtp.layers.{}.", {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"})
IN_EACH = (
    "model.mtp.layers.{}.",
    {"fc": "eh_proj", "norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"},
)
FULL = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek_v3": (NUMBERED, {"first_k_dense_replace": 1}),
    "glm4_moe": (NUMBERED, {"first_k_dense_replace": 1}),
    "mellum": (
        UNDER,
        {
            "num_mtp_layers": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse"] * 3,
        },
    ),
    "bailing_hybrid": (
        NUMBERED,
        {**FULL, "num_mtp_layers": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "mimo_v2_flash": (
        IN_EACH,
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
    ),
    "qwen3_next": (UNDER, FULL),
    "qwen3_5_moe": (UNDER, FULL),
}
IDS = [40, 41, 50, 60, 33, 90, 91, 77, 40, 41]


class WithMtp:
    """A checkpoint of two layers plus MTP layers, which are the last layers of a longer model.

    `reference` computes an MTP layer in torch.
    """

    def __init__(
        self, directory: Path, name: str, num_layers: int = 1, *, is_right: bool = False
    ) -> None:
        """Write the checkpoint; with `is_right` every layer predicts the next token correctly."""
        self.directory, self.num_layers = directory, num_layers
        (prefix, names), values = MODELS[name]
        class_name = "Qwen3_5MoeForCausalLM" if name == "qwen3_5_moe" else ""
        values = {key: _longer(value, num_layers - 1) for key, value in values.items()}
        model: Any = build_tiny_model(
            name, class_name=class_name, values={"num_hidden_layers": 2 + num_layers, **values}
        )
        self.model = model
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.parts = [self._new_parts() for _ in range(num_layers)]
        if is_right:
            self._make_right()
        model.save_pretrained(directory)
        byte_tokenizer().save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        if prefix == UNDER[0]:  # tensors beside them are shared
            self.parts = self.parts[:1] * num_layers
        for depth, parts in enumerate(self.parts):
            at = prefix.format(2 + depth if prefix == NUMBERED[0] else depth)
            own = f"model.layers.{2 + depth}."
            tensors = {key.replace(own, at): x for key, x in tensors.items()}
            shared_prefix = "mtp." if prefix == UNDER[0] else at
            for part, module in parts.items():
                tensors[f"{shared_prefix}{names.get(part, part)}.weight"] = module.weight.detach()
        if prefix == IN_EACH[0]:
            there = names["post_attention_layernorm"]
            tensors = {
                key.replace("post_attention_layernorm", there) if ".mtp." in key else key: x
                for key, x in tensors.items()
            }
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        self._write_config(model.config)

    def _new_parts(self) -> dict[str, Any]:
        width = self.model.config.hidden_size
        parts: dict[str, Any] = {"fc": nn.Linear(2 * width, width, bias=False)}
        for norm in ("enorm", "hnorm", "norm"):
            parts[norm] = copy.deepcopy(self.model.model.norm)
            nn.init.normal_(parts[norm].weight, 1.0, 0.1)
        return parts

    @torch.no_grad()
    def _make_right(self) -> None:
        for name, weight in self.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        for parts in self.parts:
            width = len(parts["fc"].weight)
            parts["fc"].weight.copy_(torch.eye(width, 2 * width))
            parts["enorm"].weight.fill_(1.0)
            parts["norm"].weight.copy_(self.model.model.norm.weight)

    def _write_config(self, config: Any) -> None:
        config = copy.deepcopy(config)
        config.num_hidden_layers = 2
        if hasattr(config, "num_mtp_layers"):
            config.num_mtp_layers = self.num_layers
        for key, value in vars(config).items():
            if isinstance(value, list) and len(value) == 2 + self.num_layers:
                setattr(config, key, value[:2])
        config.save_pretrained(self.directory)

    @torch.no_grad()
    def reference(self, ids: list[int], hidden: Tensor, depth: int = 0) -> Tensor:
        """Return the logits after each id, given the hidden states before it."""
        alone: Any = copy.deepcopy(self.model)
        parts, layer = self.parts[depth], alone.model.layers[2 + depth]
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0
        alone.model.layers, alone.model.norm = nn.ModuleList([layer]), parts["norm"]
        alone.config.num_hidden_layers = 1
        if hasattr(alone.config, "layer_types"):
            alone.config.layer_types = alone.config.layer_types[2 + depth :]
        x = alone.model.embed_tokens(torch.tensor([ids]))
        both = torch.cat([parts["enorm"](x), parts["hnorm"](hidden[None])], dim=-1)
        made = alone.model(inputs_embeds=parts["fc"](both)).last_hidden_state
        return alone.lm_head(made)[0]


def _longer(value: Any, count: int) -> Any:
    return [*value, *value[-1:] * count] if isinstance(value, list) else value


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_gives_what_torch_gives(name: str, tmp_path: Path) -> None:
    made = WithMtp(tmp_path, name, 1 if name == "mellum" else 2)
    model = tandem.load(tmp_path, dtype="float32", threads=1)
    layers = load_mtp(model)
    assert len(layers) == made.num_layers
    for depth, (head, embedding) in enumerate(layers):
        hidden = torch.randn(len(IDS), model.config.hidden_size)
        expected = made.reference(IDS, hidden, depth)
        pool = CpuSlotPool(head, two_threads(), 1, notes_hidden=True, inputs=embedding.fixed)
        embedding.give(hidden[:6])
        found = [pool.prefill_with_logits(0, IDS[:6]).clone()]
        for at in (6, 7, 8, 9):  # the last one from the recorded step
            embedding.give(hidden[at : at + 1])
            found.append(pool.verify({0: IDS[at : at + 1]}).clone())
        assert pool.step.is_replaying, pool.step.why_not
        error = (torch.cat(found) - expected).norm() / expected.norm()
        assert error < 1e-5, float(error)


class Reference:
    """Transformers' own MTP layers of a checkpoint, computed from scratch for each draft."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        from transformers.modeling_layers import MtpModel  # the oldest supported has none

        # Otherwise the released models' values.
        self.model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-9]\."]
        self.mtp: Any = MtpModel.from_pretrained(self.model)

    @torch.no_grad()
    def draft(self, tokens: list[int]) -> list[int]:
        """Return the token that each layer drafts after a sequence."""
        from transformers.cache_utils import MtpCache

        ids = torch.tensor([tokens])
        hidden = self.model.model(ids[:, :-1]).last_hidden_state
        positions = torch.arange(1, len(tokens))[None]
        cache = MtpCache(config=self.model.config.get_mtp_config())
        drafted: list[int] = self.mtp(ids[:, 1:], hidden, None, positions, cache)[0][0].tolist()
        return drafted


@pytest.mark.parametrize("num_layers", [1, 3])
def test_layers_draft_what_transformers_drafts(num_layers: int, tmp_path: Path) -> None:
    """Draft in rounds for two sequences that accept none to all tokens, then for a third one."""
    WithMtp(tmp_path, "deepseek_v3", num_layers)
    reference = Reference(tmp_path)
    model = tandem.load(tmp_path, dtype="float32", threads=1)
    threads = two_threads()
    drafter = DRAFTERS.factory("mtp")(DraftParts(model=model, threads=threads))
    assert isinstance(drafter, MtpDrafter)
    pool = CpuSlotPool(model, threads, 2, notes_hidden=True)
    drafter.follow(pool)
    texts = {0: [*IDS], 1: [33, 70, 71, 72] * 10}
    pool.prefill(texts)
    random = torch.Generator().manual_seed(3)
    for kept in (0, 3, 1, 4, 2, 0, 5):
        texts = {slot: [*text, 50 + slot] for slot, text in texts.items()}
        drafts = drafter.draft(texts, {0: 5, 1: 2 + kept}, 0.0)
        for slot, text in texts.items():
            found = list(drafts[slot].tokens)
            expected = reference.draft(text)
            assert found[:num_layers] == expected[: len(found)]
            pool.verify({slot: [text[-1], *found]})
            pool.keep(slot, len(text) + min(kept, len(found)))
            texts[slot] = [*pool.held(slot)]
    again = [*texts[0][:12], *torch.randint(32, 120, (8,), generator=random).tolist()]
    pool.keep(0, 12)
    pool.prefill({0: again[12:-1]})
    # The hidden state of the last token is lost, so drafts may differ.
    assert len(drafter.draft({0: again}, {0: 3}, 0.0)[0].tokens) == 3


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [("deepseek_v3", 1), ("glm4_moe", 3), ("qwen3_5_moe", 2), ("mimo_v2_flash", 3)],
)
def test_answers_with_it_are_those_without(
    name: str, num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.policy.speculation.paid_drafts._TRIALS", 10**6)  # each step drafts
    WithMtp(tmp_path, name, num_layers)
    model = tandem.load(
        tmp_path, dtype="bfloat16", expert_dtype="int8-g32", dense_dtype="int8-g32", threads=1
    )
    generator = Generator(model, speculate="mtp")
    model.generation_config.eos_token_id = None
    prompts = [IDS, [33] * 50, [70, 71, 72]]
    for prompt in (prompts[:1], prompts):
        options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.7, "seed": 2}
        expected = Generator(model, speculate="none").generate(prompt, **options)
        answers = generator.generate(prompt, **options)
        assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
        assert sum(answer.drafted_tokens for answer in answers) > 0


def test_right_layers_are_always_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.policy.speculation.paid_drafts._TRIALS", 10**6)
    WithMtp(tmp_path, "deepseek_v3", 2, is_right=True)
    model = tandem.load(tmp_path, dtype="float32", dense_dtype="int8-g32", threads=1)
    model.generation_config.eos_token_id = None
    generator = Generator(model, speculate="mtp")
    answers = generator.generate([IDS, [70, 71, 72]], max_new_tokens=30, temperature=0)
    for answer in answers:
        assert answer.drafted_tokens == answer.accepted_tokens > 0


def test_a_checkpoint_without_the_layer_drafts_otherwise(tmp_path: Path) -> None:
    build_tiny_model("deepseek_v3").save_pretrained(tmp_path)
    model = tandem.load(tmp_path, threads=1)
    with pytest.raises(UnsupportedModelError, match="has no MTP layer"):
        load_mtp(model)
    with pytest.warns(TandemWarning, match="nothing is drafted by mtp: .* has no MTP layer"):
        generator = Generator(model, speculate="mtp")
    (answer,) = generator.generate([IDS], max_new_tokens=2)
    assert len(answer.token_ids) > 0


@pytest.mark.parametrize("dtype", ["int8-g32", "int4", "bf16"])
def test_a_part_of_the_head_drafts(dtype: str) -> None:
    threads = two_threads()
    packed = pack_dense(torch.randn(100, 128), None, find_format(dtype))
    whole = PackedLinear(packed, threads, torch.bfloat16)
    x = torch.randn(3, 128)
    assert torch.equal(first_rows(whole, 32)(x), whole(x)[:, :32])


def test_layouts() -> None:
    joining = ["eh_proj", "enorm", "hnorm", "shared_head.norm"]
    names = [f"model.layers.61.{part}.weight" for part in [*joining, "mlp.gate", "embed_tokens"]]
    (found,) = mtp_names([*names, "model.layers.60.mlp.gate.weight"], 61)
    assert found["model.layers.61.mlp.gate.weight"] == "model.layers.0.mlp.gate.weight"
    assert set(found.values()) == {
        "fc.weight", "enorm.weight", "hnorm.weight", "model.norm.weight",
        "model.layers.0.mlp.gate.weight",
    }  # fmt: skip
    assert mtp_names(names[1:], 61) == []
    assert mtp_names(names, 60) == []
    second = [name.replace(".61.", ".62.") for name in names]
    assert [*map(len, mtp_names([*names, *second], 61))] == [5, 5]
    assert len(mtp_names([*names, *second[1:]], 61)) == 1


def test_a_step_on_a_gpu_tells_what_the_head_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin's layer drafts the same tokens as on the CPU."""
    monkeypatch.setattr("tandem.policy.speculation.paid_drafts._TRIALS", 10**6)
    WithMtp(tmp_path, "deepseek_v3")
    model = tandem.load(tmp_path, dtype="float32", threads=1)
    model.generation_config.eos_token_id = None
    pools: list[CpuSlotPool | CudaSlotPool] = [
        CpuSlotPool(model, two_threads(), 1, notes_hidden=True),
        CudaSlotPool(model, 1, make_capture=TwinCapture, notes_hidden=True),
    ]
    calls_of_pools: list[list[tuple[int, int, Tensor]]] = [[], []]
    for pool, calls in zip(pools, calls_of_pools, strict=True):
        pool.on_hidden = lambda *call, calls=calls: calls.append((*call[:2], call[2].clone()))
        pool.prefill({0: IDS})
        for _ in range(5):
            pool.verify({0: [40, 41, 42]})
            pool.keep(0, len(pool.held(0)) - 1)
        assert pool.step.is_replaying, pool.step.why_not
    assert len(calls_of_pools[0]) == 6
    for (_, first, ours), (_, expected_first, theirs) in zip(*calls_of_pools, strict=True):
        assert first == expected_first
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    (expected,) = Generator(model, speculate="none").generate([IDS], max_new_tokens=12)
    generator = Generator(model, speculate="mtp")
    monkeypatch.setattr(generator, "slot_pool", lambda *args, **options: pools[1])
    (answer,) = generator.generate([IDS], max_new_tokens=12)
    assert answer.token_ids == expected.token_ids
    assert answer.drafted_tokens > 0
