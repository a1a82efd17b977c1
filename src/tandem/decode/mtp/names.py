"""Finds a checkpoint's MTP layers and maps their tensors' names to those of a one-layer model.

Tandem runs each MTP layer as such a one-layer model.

The known layouts are:
- layers after the model's last layer (DeepSeek-V3, GLM-4.5, Ling);
- under `mtp.`; the modules that combine token and hidden state are stored once, outside the layers
  (Qwen3-Next, Qwen3.5 and 3.6, Mellum), or in each layer (MiMo V2);
- under `mtp.` and the layer's number, with separate projections of token and hidden state
  (DeepSeek-V4);
- under `mtp.`, with each decoder layer in a block of its own (Inkling).
"""

import re
from collections.abc import Collection, Iterable, Mapping

# Prefix of a tensor's name within its layer or under `mtp.` -> Tandem's prefix.
_PARTS = {
    "fc.": "fc.",
    "eh_proj.": "fc.",
    "enorm.": "enorm.",
    "pre_fc_norm_embedding.": "enorm.",
    "hnorm.": "hnorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "norm.": "model.norm.",
    "shared_head.norm.": "model.norm.",
    "final_layernorm.": "model.norm.",
}
# Names that differ from those in the model's own layers.
_OWN = {"pre_mlp_layernorm.weight": "post_attention_layernorm.weight"}
# Copies of tensors that the model has.
_SHARED = ("embed_tokens.", "shared_head.head.", "shared_head.weight")
# Inkling's prefixes -> Tandem's; one norm may follow all of its MTP layers.
_INKLING = {
    "input_proj.": "fc.", "embed_norm.": "enorm.", "hidden_norm.": "hnorm.",
    "chain_norm.": "model.norm.", "transformer_block.": "model.layers.0.",
}  # fmt: skip
_INKLING_NEEDED = ("fc.weight", "enorm.weight", "hnorm.weight")
GATE_UP_ROWS = "mlp.gate_up_rows."
"""The part of a name that marks interleaved rows of gate and up projections."""
# The same for Inkling's decoder layer in its checkpoints.
_INKLING_LAYER = {
    "attn_norm.": "input_layernorm.",
    "mlp_norm.": "post_attention_layernorm.",
    "attn_sconv.": "attn_sconv.conv1d.",
    "mlp_sconv.": "mlp_sconv.conv1d.",
    "attn.wq_du.": "self_attn.q_proj.",
    "attn.wk_dv.": "self_attn.k_proj.",
    "attn.wv_dv.": "self_attn.v_proj.",
    "attn.wr_du.": "self_attn.r_proj.",
    "attn.wo_ud.": "self_attn.o_proj.",
    "attn.k_sconv.": "self_attn.k_sconv.conv1d.",
    "attn.v_sconv.": "self_attn.v_sconv.conv1d.",
    "attn.": "self_attn.",
    "mlp.w13_dn.": GATE_UP_ROWS,
    "mlp.w2_md.": "mlp.down_proj.",
}
# Later releases of DeepSeek-V4 have other layers, which join tokens with these.
_DSPARK = re.compile(r"^mtp\.\d+\.(?:main_proj|markov_head|confidence_head)\.")
# Tensors needed beside the decoder layer's.
NEEDED = ("fc.weight", "enorm.weight", "hnorm.weight", "model.norm.weight")
# DeepSeek-V4's prefixes. Transformers' own mapping would take one of its norms for attention's.
_STREAMED = {
    "e_proj.": "e_proj.", "h_proj.": "h_proj.", "enorm.": "enorm.", "hnorm.": "hnorm.",
    "norm.": "norm.", "hc_head_": "model.hc_head.hc_",
}  # fmt: skip
_STREAMED_NEEDED = (
    "e_proj.weight", "h_proj.weight", "enorm.weight", "hnorm.weight", "norm.weight",
)  # fmt: skip
# What joins a token with the previous hidden state; all other tensors belong to the layer's model.
JOINING = ("fc.", "e_proj.", "h_proj.", "enorm.", "hnorm.")


def mtp_names(names: Iterable[str], num_layers: int) -> list[dict[str, str]]:
    """Return for each MTP layer, in order, {name in the checkpoint: name in a one-layer model}.

    The list is empty if the checkpoint has no MTP layers in a known layout. A tensor under `mtp.`
    that is in no layer is listed for every layer.
    """
    names = list(names)
    found: list[dict[str, str]] = []
    while of_layer := (
        _names_of(names, num_layers, len(found))
        or _streamed_names_of(names, len(found))
        or _inkling_names_of(names, len(found))
    ):
        found.append(of_layer)
    return found


def why_unknown(names: Collection[str], num_layers: int) -> str:
    """Return why a checkpoint has no known MTP layer: a sentence without its subject, the path."""
    if any(_DSPARK.match(name) for name in names):
        return (
            "has layers in DSpark's layout, which drafts a block at once; Tandem does not read it"
        )
    return f"has no MTP layer, under mtp. or as layer {num_layers}, in a layout that is known"


def has_no_norm(names: Iterable[str]) -> bool:
    """Tell whether the head reads the MTP layer's output without a norm (some Inkling models)."""
    names = list(names)
    is_inkling = any(".transformer_block." in name for name in names)
    return is_inkling and not any("mtp.chain_norm." in name for name in names)


def _names_of(names: Iterable[str], num_layers: int, depth: int) -> dict[str, str]:
    """Return `mtp_names`' mapping for the MTP layer at index `depth`; empty if tensors are missing.

    The layer must follow the model's last layer, or be under `mtp.` as in Qwen3-Next or MiMo V2.
    """
    after_layers = re.compile(
        rf"^(?:model\.)?(?:language_model\.)?layers\.{num_layers + depth}\.(.+)$"
    )
    under = re.compile(
        rf"^(?:model\.)?mtp\.(?:layers\.{depth}\.(?P<layer>.+)|(?!layers\.)(?P<joining>.+))$"
    )
    found = {}
    for name in names:
        inside = None
        if match := after_layers.match(name):
            inside = _renamed(match[1], _PARTS) or f"model.layers.0.{match[1]}"
        elif match := under.match(name):
            layer = match["layer"]
            part = layer or match["joining"]
            inside = _renamed(part, _PARTS) or (
                layer and f"model.layers.0.{_OWN.get(layer, layer)}"
            )
        if inside is not None and not inside.removeprefix("model.layers.0.").startswith(_SHARED):
            found[name] = inside
    has_layer = any(new.startswith("model.layers.0.") for new in found.values())
    return found if has_layer and set(NEEDED) <= set(found.values()) else {}


def _streamed_names_of(names: Iterable[str], depth: int) -> dict[str, str]:
    """Return `mtp_names`' mapping for a DeepSeek-V4 MTP layer; empty if tensors are missing."""
    before = f"mtp.{depth}."
    parts = {name: name.removeprefix(before) for name in names if name.startswith(before)}
    found = {
        name: _renamed(part, _STREAMED) or f"model.layers.0.{part}" for name, part in parts.items()
    }
    has_layer = any(new.startswith("model.layers.0.") for new in found.values())
    return found if has_layer and set(_STREAMED_NEEDED) <= set(found.values()) else {}


def _inkling_names_of(names: Iterable[str], depth: int) -> dict[str, str]:
    """Return `mtp_names`' mapping for an Inkling MTP layer; empty if tensors are missing."""
    inside = re.compile(rf"^(?:model\.)?mtp\.(?:layers\.{depth}\.)?(?!layers\.)(.+)$")
    found = {}
    for name in names:
        match = inside.match(name)
        new = _renamed(match[1], _INKLING) if match else None
        if new is not None:
            before, layer, part = new.rpartition("model.layers.0.")
            found[name] = before + layer + ((layer and _renamed(part, _INKLING_LAYER)) or part)
    has_layer = any(new.startswith("model.layers.0.") for new in found.values())
    return found if has_layer and set(_INKLING_NEEDED) <= set(found.values()) else {}


def _renamed(part: str, parts: Mapping[str, str]) -> str | None:
    for prefix, new in parts.items():
        if part.startswith(prefix):
            return new + part.removeprefix(prefix)
    return None
