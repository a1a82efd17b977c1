"""MTP layers in GGUF files: after a model's own layers, or alone in a file beside the model's.

llama.cpp's converter omits DeepSeek-V4's MTP layer from the model's file. With `--mtp` it writes
the layer, the token embedding and the output head into a separate file, `mtp-*.gguf`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint.sources.gguf import gguf_source
from tandem.checkpoint.sources.gguf_header import GgufHeader, read_header
from tandem.checkpoint.sources.gguf_models.config_values import num_layers
from tandem.checkpoint.sources.gguf_weight import tensor_values
from tandem.checkpoint.sources.source import Source
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.foreign_types import PreTrainedConfig

_ARCHITECTURE = "deepseek4"  # MTP layers of other architectures are not read
_JOINS = "blk.{}.nextn.eh_proj.weight"
_NORM = "blk.0.nextn.shared_head_norm.weight"


def find_mtp(file: Path, hidden_size: int) -> list[GgufHeader]:
    """Return one header for each MTP layer, in order; each describes a model of this layer alone.

    The layers are in the model's GGUF file or in a file beside it, and must have the hidden size
    `hidden_size`. Raises `UnsupportedModelError` if no file has such layers, and `ModelError` for a
    damaged file.
    """
    header = read_header(file)
    if header.architecture != _ARCHITECTURE:
        raise UnsupportedModelError(
            f"{file} is of architecture {header.architecture!r}; of GGUF files Tandem reads the "
            f"MTP layer of {_ARCHITECTURE} alone: use the model's safetensors instead"
        )
    for path in (file, *sorted(file.parent.glob("mtp-*.gguf"))):
        found = _layers_in(read_header(path), hidden_size)
        if found:
            return found
    raise UnsupportedModelError(
        f"{file} has no MTP layer, as llama.cpp's converter leaves it out; put the file that it "
        "writes with --mtp into the same directory, as mtp-*.gguf"
    )


def mtp_source(
    header: GgufHeader, shapes: Mapping[str, torch.Size], config: PreTrainedConfig
) -> Source:
    """Return the weights of one MTP layer, with separate projections `e_proj` and `h_proj`.

    `shapes` are those of the parameters of `config`'s model, which has only this layer.
    """
    source, width = gguf_source(header, shapes, config), config.hidden_size
    both = _values(header, _JOINS.format(0), 2 * width, width)
    source.plain["e_proj.weight"], source.plain["h_proj.weight"] = both.chunk(2, dim=1)
    for norm in ("enorm", "hnorm"):
        source.plain[f"{norm}.weight"] = _values(header, f"blk.0.nextn.{norm}.weight", width)
    return source


def _layers_in(header: GgufHeader, hidden_size: int) -> list[GgufHeader]:
    if header.architecture != _ARCHITECTURE:
        return []
    found: list[GgufHeader] = []
    while joins := header.tensors.get(_JOINS.format(num_layers(header) + len(found))):
        if joins.shape != (2 * hidden_size, hidden_size):
            return []
        found.append(_alone(header, num_layers(header) + len(found)))
    return found


def _alone(header: GgufHeader, layer: int) -> GgufHeader:
    """Return a header of a model whose only layer, number 0, is `layer`.

    The model also has the file's `output_` tensors; its output norm is the layer's own norm, if the
    file has one.
    """
    before = f"blk.{layer}."
    tensors = {
        f"blk.0.{name.removeprefix(before)}": tensor
        for name, tensor in header.tensors.items()
        if name.startswith(before)
    }
    tensors |= {n: tensor for n, tensor in header.tensors.items() if n.startswith("output_")}
    if _NORM in tensors:
        tensors["output_norm.weight"] = tensors[_NORM]
    return replace(header, tensors=tensors)


def _values(header: GgufHeader, name: str, *shape: int) -> Tensor:
    tensor = header.tensors.get(name)
    if tensor is None or tensor.shape != shape:
        found = "none" if tensor is None else f"one of {tensor.shape}"
        raise ModelError(
            f"{header.file} has {found} as {name.removeprefix('blk.0.')} of its MTP layer, "
            f"expected {shape}; download it again"
        )
    return tensor_values(tensor)
