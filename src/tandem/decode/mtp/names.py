"""Where a checkpoint keeps its MTP layer, and what its tensors are called in a model of one layer.

Two layouts: behind the last layer of the model (DeepSeek-V3, GLM-4.5, Ling), or under `mtp.`, with
what joins token and hidden state beside the layers (Qwen3-Next, Qwen3.5 and 3.6, Mellum) or in each
(MiMo V2).
"""

import re
from collections.abc import Iterable

# What of a tensor's name within its layer, or under `mtp.`, becomes what.
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
# What of a layer is called otherwise in the model's own layers.
_OWN = {"pre_mlp_layernorm.weight": "post_attention_layernorm.weight"}
# Copies of what the model has itself.
_SHARED = ("embed_tokens.", "shared_head.head.", "shared_head.weight")
# Norms and projection of an MTP layer as Inkling names them, and what its block is in.
_INKLING = re.compile(
    r"^(?:model\.)?mtp\.layers\.\d+\.(?:hidden_norm|input_proj|transformer_block)\."
)
# Of the parts beside the layer.
NEEDED = ("fc.weight", "enorm.weight", "hnorm.weight", "model.norm.weight")


def mtp_names(names: Iterable[str], num_layers: int) -> list[dict[str, str]]:
    """Return the names in a model of one layer, by those in the checkpoint of a model of several.

    For each MTP layer, the first one first; empty if there is none in a known layout. Under `mtp.`
    all layers share what is beside them, if something is.
    """
    names = list(names)
    found: list[dict[str, str]] = []
    while of_layer := _names_of(names, num_layers, len(found)):
        found.append(of_layer)
    return found


def why_unknown(names: Iterable[str], num_layers: int) -> str:
    """Say what is wrong with a checkpoint in which no MTP layer has been found, after its name."""
    if any(_INKLING.match(name) for name in names):
        return (
            "has MTP layers in Inkling's layout, whose attention adds a bias by distance: models "
            "with it run padded, where no drafted token is verified"
        )
    return f"has no MTP layer, under mtp. or as layer {num_layers}, in a layout that is known"


def _names_of(names: Iterable[str], num_layers: int, depth: int) -> dict[str, str]:
    """Return the names for one MTP layer; empty if it is not whole."""
    behind = re.compile(rf"^(?:model\.)?(?:language_model\.)?layers\.{num_layers + depth}\.(.+)$")
    under = re.compile(
        rf"^(?:model\.)?mtp\.(?:layers\.{depth}\.(?P<layer>.+)|(?!layers\.)(?P<beside>.+))$"
    )
    found = {}
    for name in names:
        inside = None
        if match := behind.match(name):
            inside = _renamed(match[1]) or f"model.layers.0.{match[1]}"
        elif match := under.match(name):
            layer = match["layer"]
            part = layer or match["beside"]
            inside = _renamed(part) or (layer and f"model.layers.0.{_OWN.get(layer, layer)}")
        if inside is not None and not inside.removeprefix("model.layers.0.").startswith(_SHARED):
            found[name] = inside
    has_layer = any(new.startswith("model.layers.0.") for new in found.values())
    return found if has_layer and set(NEEDED) <= set(found.values()) else {}


def _renamed(part: str) -> str | None:
    for prefix, new in _PARTS.items():
        if part.startswith(prefix):
            return new + part.removeprefix(prefix)
    return None
