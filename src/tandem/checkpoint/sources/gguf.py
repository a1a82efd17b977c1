"""GGUF files of Mixture-of-Experts models: blocks that map onto packed formats keep their codes.

The names of tensors come from Transformers and the gguf package. Of a layer's experts, gate and up
are tensors of their own, (num_experts, rows, cols) in blocks along the columns.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint.sources.codes import StoredWeight
from tandem.checkpoint.sources.gguf_config import ARCHITECTURES, Architecture
from tandem.checkpoint.sources.gguf_header import GgufHeader, read_header
from tandem.checkpoint.sources.gguf_weight import (
    PLAIN_DTYPES,
    GgufWeight,
    HalvedLatent,
    PlainTensor,
)
from tandem.checkpoint.sources.source import Source
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.foreign_types import PreTrainedConfig, PreTrainedModel

# Beside NVFP4: of a matrix, and of the activations that a GPU would round to it.
_FACTORS = ("scale", "input_scale")
_LATENT_KEYS = "attn_k_b."
# Of the experts' first projection, and the biases that follow their rows.
_GATE, _UP = "_gate_exps", "_up_exps"


def read_gguf_header(file: Path) -> GgufHeader:
    """Read what a GGUF file (with its other parts) holds; its tensors stay unread.

    Raises `ModelError` for a damaged file and `UnsupportedModelError` for an architecture that is
    not read.
    """
    header = read_header(file)
    architecture = header.architecture
    if architecture == "clip":
        raise UnsupportedModelError(
            f"{file} reads images for a model (mmproj) and is none itself; give the .gguf file "
            "beside it, and Tandem reads its text model"
        )
    if architecture not in ARCHITECTURES or header.expert_width is None:
        what = architecture if architecture not in ARCHITECTURES else f"{architecture} (no experts)"
        raise UnsupportedModelError(
            f"{file} is of architecture {what!r}; of GGUF Tandem reads models with experts of "
            f"{', '.join(ARCHITECTURES)}: use the model's safetensors instead"
        )
    _require_counts(header)
    return header


def open_gguf(
    file: Path,
    model_of: Callable[[PreTrainedConfig], PreTrainedModel],
    *,
    adapt: Callable[[PreTrainedConfig], None] = lambda _: None,
) -> tuple[PreTrainedConfig, Source]:
    """Return Transformers' config of a GGUF file, and its weights.

    `model_of` builds a config's model without memory; `adapt` changes the config before. Raises as
    `read_gguf_header` does.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, get_gguf_hf_weights_map

    header = read_gguf_header(file)
    architecture = ARCHITECTURES[header.architecture]
    config = architecture.config(header)
    config.dtype = _dense_dtype(header)
    adapt(config)
    model = model_of(config)
    if architecture.names not in TENSOR_PROCESSORS:
        raise UnsupportedModelError(
            f"{file} is of architecture {header.architecture!r}, for which the installed "
            "Transformers is too old; pip install --upgrade transformers"
        )
    processor = TENSOR_PROCESSORS[architecture.names](config=config.to_dict())
    names = get_gguf_hf_weights_map(model, processor, header.architecture)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    return config, _source(header, names, shapes, config)


def _require_counts(header: GgufHeader) -> None:
    """Raise `ModelError` if the metadata count something else than the tensors have."""
    numbers = (name.split(".")[1] for name in header.tensors if name.startswith("blk."))
    layers = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
    embedding = header.tensors.get("token_embd.weight")
    experts = next(t for name, t in header.tensors.items() if "ffn_gate_exps.weight" in name)
    if (predicting := header.value("nextn_predict_layers", 0)) and isinstance(predicting, int):
        layers = max(layers, int(header.value("block_count", 0)) - predicting)
    found = {
        "block_count": layers,
        "embedding_length": None if embedding is None else embedding.shape[0],
        "expert_count": experts.shape[-1],
    }
    for key, count in found.items():
        if count is not None and header.value(key) != count:
            raise ModelError(
                f"{header.file} says that its {key} is {header.value(key)}, and its tensors have "
                f"{count}; download it again"
            )


def _dense_dtype(header: GgufHeader) -> torch.dtype:
    """Return the dtype of what is in no blocks: a file of fp16 keeps it, else it is bf16."""
    kinds = {t.tensor_type.name for t in header.tensors.values() if len(t.shape) > 1}
    return torch.float16 if "F16" in kinds and kinds <= {"F16", "F32"} else torch.bfloat16


def _source(
    header: GgufHeader,
    names: Mapping[str, str],
    shapes: Mapping[str, torch.Size],
    config: PreTrainedConfig,
) -> Source:
    """Return the file's tensors by Transformers' names."""
    architecture = ARCHITECTURES[header.architecture]
    weights: dict[str, StoredWeight] = {}
    plain: dict[str, object] = {}
    for name in header.tensors:
        target = _target(name, names)
        if target not in shapes or target in weights or target in plain:
            continue  # such as rope frequencies, which Transformers computes; up, which is in gate
        parts = tuple(header.tensors[part] for part in _parts(name))
        factors = tuple(header.tensors.get(_factor_name(part)) for part in _parts(name))
        joined = GgufWeight(
            name=target,
            tensors=parts,
            is_interleaved=architecture.is_interleaved,
            row_order=_row_order(name, architecture, config),
            factors=factors if any(factors) else (),
        )
        if not joined.factors and all(part.tensor_type.name in PLAIN_DTYPES for part in parts):
            plain[target] = PlainTensor(joined, shapes[target])
        else:
            weights[target] = joined
    plain |= _latents(header, names)
    return Source("gguf", weights, plain)


def _latents(header: GgufHeader, names: Mapping[str, str]) -> dict[str, HalvedLatent]:
    """Return the second latent matrices of attention, which newer files have in halves."""
    found = {}
    for name, keys in header.tensors.items():
        target = names.get(name.replace(_LATENT_KEYS, "attn_kv_b."))
        if _LATENT_KEYS in name and target is not None:
            values = header.tensors[name.replace(_LATENT_KEYS, "attn_v_b.")]
            found[target] = HalvedLatent(keys, values)
    return found


def _target(name: str, names: Mapping[str, str]) -> str:
    """Return Transformers' name of a tensor, "" if it has none."""
    # The map has tensors that are no module's, such as fused experts, without ".weight".
    stem, _, kind = name.rpartition(".")
    if kind in _FACTORS:
        return ""
    if kind == "bias" and stem in names:
        return f"{names[stem]}_bias"
    if stem.endswith("exp_probs_b") and name not in names:  # DeepSeek's
        return f"model.layers.{name.split('.')[1]}.mlp.gate.e_score_correction_bias"
    return names.get(name) or names.get(stem, "")


def _factor_name(name: str) -> str:
    """Return the name of what a matrix is to be multiplied with, where there is such a tensor."""
    return f"{name.rpartition('.')[0]}.{_FACTORS[0]}" if name.endswith(".weight") else ""


def _parts(name: str) -> list[str]:
    """Return the names of the tensors that make one with this: itself, or gate and up."""
    for present in (_GATE, _UP):
        if present in name:
            return [name.replace(present, _GATE), name.replace(present, _UP)]
    return [name]


def _row_order(name: str, architecture: Architecture, config: PreTrainedConfig) -> Tensor | None:
    """Return which row of a file's matrix each row of Transformers' is; None: they are the same."""
    if not architecture.has_ordered_heads or not (".attn_q." in name or ".attn_k." in name):
        return None
    is_query = ".attn_q." in name
    heads = config.num_attention_heads if is_query else config.num_key_value_heads
    # llama.cpp rotates pairs of neighbours, Transformers the two halves of a head.
    rows = torch.arange(heads * config.head_dim, device="cpu").view(heads, config.head_dim // 2, 2)
    return rows.transpose(1, 2).flatten()
