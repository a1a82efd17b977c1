"""How files of one GGUF architecture become a Transformers model: config, names, row orders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tandem.checkpoint.sources.gguf_header import GgufHeader
from tandem.foreign_types import PreTrainedConfig

_KINDS = ("", ".weight", ".bias")
Order = Callable[[PreTrainedConfig], Tensor | None]
Values = Callable[[Sequence[Tensor], PreTrainedConfig], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which tensors of a file make up one parameter, and how."""

    tensors: tuple[str, ...]
    """Tensors whose rows are concatenated, named within a layer or in the whole model."""
    rows: Order | None = None
    """Returns, for each row in Transformers, its row in the file. None: the same order."""
    columns: Order | None = None
    """Returns, for each column in the file, its column in Transformers. None: the same order."""
    values: Values | None = None
    """Computes the parameter from its tensors. None: the tensors are concatenated."""


Names = dict[str, "str | Recipe | tuple[str | Recipe, ...]"]
"""Keys: a parameter's name within its layer or the end of that name, with or without its kind
(weight, bias). Values: the tensor's name in the same form; a recipe; or a tuple of alternatives, of
which a file has one."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to turn files of one `general.architecture` into a Transformers model."""

    config: Callable[[GgufHeader], PreTrainedConfig]
    names: Names = field(default_factory=dict)
    """Names that this architecture adds to `COMMON`; they are looked up first."""
    is_interleaved: bool = False
    """Whether Transformers interleaves gate and up rows."""
    is_transposed: bool = False
    """Whether Transformers stores experts' matrices transposed."""
    may_be_dense: bool = False
    """Whether some files of this architecture have no experts."""

    def recipe(self, parameter: str, has: Callable[[str], bool]) -> Recipe | None:
        """Return the recipe for a parameter, named within its layer; None if the file has none.

        `has` tells whether the file has a tensor.
        """
        for names in (self.names, COMMON):
            for recipe in _found(names, parameter):
                if all(map(has, recipe.tensors)):
                    return recipe
        return None


def _found(names: Names, parameter: str) -> Sequence[Recipe]:
    """Return the recipes of the longest key that ends a parameter's name; empty if none does."""
    parts = parameter.split(".")
    for start in range(len(parts)):
        whole = ".".join(parts[start:])
        stem, _, kind = whole.rpartition(".")
        for key, suffix in ((whole, ""), (stem, f".{kind}")):
            if key in names and suffix in _KINDS:
                listed = names[key]
                entries = listed if isinstance(listed, tuple) else (listed,)
                return [_with_kind(entry, suffix) for entry in entries]
    return []


def _with_kind(entry: str | Recipe, suffix: str) -> Recipe:
    recipe = Recipe((entry,)) if isinstance(entry, str) else entry
    return replace(recipe, tensors=tuple(name + suffix for name in recipe.tensors))


def less_one(parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    """Return the weight of a norm; llama.cpp stores this weight plus one."""
    (weight,) = parts
    return weight.float() - 1


def _joined_latents(parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    """Return the weight of `kv_b_proj`, joined from the file's key and value projections.

    In the file, keys are (heads, latents, width) and values (heads, width, latents).
    """
    keys, values = parts
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


# Suffixes of Transformers' names -> llama.cpp's; if there are two, a file has one of them.
COMMON: Names = {
    "embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": ("ffn_norm", "post_attention_norm"),
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "self_attn.sinks": (
        "attn_sinks.weight", "attn_sinks",
    ),
    "q_a_proj": "attn_q_a", "q_a_layernorm": "attn_q_a_norm", "q_b_proj": "attn_q_b",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_a_layernorm": "attn_kv_a_norm",
    "kv_b_proj": (
        "attn_kv_b", Recipe(("attn_k_b", "attn_v_b"), values=_joined_latents),
    ),
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "router": "ffn_gate_inp",
    "e_score_correction_bias": ("exp_probs_b.bias", "exp_probs_b"),
    "experts.gate_up_proj": (
        Recipe(("ffn_gate_exps.weight", "ffn_up_exps.weight")), "ffn_gate_up_exps.weight",
    ),
    "experts.up_proj": "ffn_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "experts.gate_up_proj_bias": Recipe(("ffn_gate_exps.bias", "ffn_up_exps.bias")),
    "experts.down_proj_bias": "ffn_down_exps.bias",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("shared_expert", "shared_experts", "shared_mlp")
        for part in ("gate", "up", "down")
    },
}  # fmt: skip
