"""GGUF files of Mixture-of-Experts models: blocks that map onto packed formats keep their codes.

Config, tokenizer and the names of tensors come from Transformers and the gguf package. Of a
layer's experts, gate and up are tensors of their own, (num_experts, rows, cols) in blocks along the
columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.hf.sources.codes import Codes, StoredWeight
from tandem.hf.sources.source import Source
from tandem.kernels.formats import WeightFormat, find_format

# What llama.cpp renames only; other architectures' values are changed as well.
ARCHITECTURES = ("qwen2moe", "qwen3moe")
_PLAIN = ("F32", "F16", "BF16")
_BLOCK = 32
_UNREADABLE = "{file} cannot be read as GGUF ({reason}); download it again"


def open_gguf(file: Path, model_of: Callable[[Any], Any]) -> tuple[Any, Source]:
    """Return Transformers' config of a GGUF file, and its weights.

    `model_of` builds a config's model without memory. Raises `ModelError` for a damaged file and
    `UnsupportedModelError` for an architecture that is not read.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnsupportedModelError(
            f"{file} needs the gguf package, which is not installed; pip install gguf"
        ) from error
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        get_gguf_hf_weights_map,
        read_field,
    )

    try:
        reader = GGUFReader(file)
        architecture = str(read_field(reader, "general.architecture")[0])
    except (ValueError, IndexError, KeyError, OSError, TypeError) as error:
        raise ModelError(_UNREADABLE.format(file=file, reason=error)) from error
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file} is of architecture {architecture!r}; of GGUF Tandem reads "
            f"{', '.join(ARCHITECTURES)}: use the model's safetensors instead"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _require_whole(file, tensors)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    _read_widths(config, tensors)
    model = model_of(config)
    names = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS[architecture](config=config.to_dict()))
    return config, _source(tensors, names, {n: p.shape for n, p in model.state_dict().items()})


def _require_whole(file: Path, tensors: Mapping[str, Any]) -> None:
    size = file.stat().st_size
    end = max((int(t.data_offset) + int(t.n_bytes) for t in tensors.values()), default=0)
    if size < end:
        raise ModelError(f"{file} has {size} bytes, expected {end}; download it again")


def _read_widths(config: Any, tensors: Mapping[str, Any]) -> None:
    """Set the widths that Transformers leaves at their defaults, from the tensors' shapes."""
    for attribute, name in (
        ("moe_intermediate_size", "blk.0.ffn_gate_exps.weight"),
        ("shared_expert_intermediate_size", "blk.0.ffn_gate_shexp.weight"),
    ):
        if name in tensors and hasattr(config, attribute):
            setattr(config, attribute, int(tensors[name].shape[1]))


def _source(
    tensors: Mapping[str, Any], names: Mapping[str, str], shapes: Mapping[str, torch.Size]
) -> Source:
    weights: dict[str, StoredWeight] = {}
    plain: dict[str, Any] = {}
    for name, tensor in tensors.items():
        # The map has fused experts without ".weight".
        target = names.get(name) or names.get(name.removesuffix(".weight"))
        if target is None or target not in shapes:
            continue  # such as rope frequencies, which Transformers computes
        weight = GgufWeight(name=target, tensors=(tensor,))
        if "_gate_exps" in name or "_up_exps" in name:
            parts = [tensors[name.replace(old, new)] for old, new in _pairs(name)]
            weight = GgufWeight(name=target, tensors=tuple(parts))
        if tensor.tensor_type.name in _PLAIN and len(weight.tensors) == 1:
            plain[target] = _plain_values(tensor).reshape(shapes[target])
        else:
            weights[target] = weight
    return Source("gguf", weights, plain)


def _pairs(name: str) -> Sequence[tuple[str, str]]:
    """Return the replacements that make a gate's or up's name the gate's, and the up's."""
    present = "_gate_exps" if "_gate_exps" in name else "_up_exps"
    return (present, "_gate_exps"), (present, "_up_exps")


def _plain_values(tensor: Any) -> Tensor:
    data = np.array(tensor.data)  # a copy: the file is mapped for reading only
    if tensor.tensor_type.name == "BF16":
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """A weight of one tensor, or of several whose rows follow each other (gate, then up)."""

    name: str
    tensors: tuple[Any, ...] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in Transformers' order."""
        *leading, cols = (int(size) for size in reversed(self.tensors[0].shape))
        if len(self.tensors) > 1:
            leading[-1] *= len(self.tensors)
        return (*leading, cols)

    @property
    def formats(self) -> Sequence[WeightFormat]:
        """The one format that holds these blocks exactly, if all parts have the same."""
        kinds = {tensor.tensor_type.name for tensor in self.tensors}
        name = _FORMATS.get(kinds.pop()) if len(kinds) == 1 else None
        return () if name is None else (find_format(name),)

    @property
    def why_not(self) -> str:
        """What blocks these are, where no format holds them."""
        kinds = sorted({tensor.tensor_type.name for tensor in self.tensors})
        return "" if self.formats else f"GGUF blocks {' and '.join(kinds)}"

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return sum(int(tensor.n_bytes) for tensor in self.tensors)

    def read(self, expert: int | None = None) -> Codes:
        """Read the matrix, or one expert's, as codes where a format holds them, else as values."""
        parts = []
        for tensor in self.tensors:
            data = tensor.data if expert is None else tensor.data[expert]
            parts.append(_decoded(np.array(data), tensor.tensor_type, keep=bool(self.formats)))
        if len(parts) == 1:
            return parts[0]
        zeros = None
        minima = [p.minima for p in parts if p.minima is not None]
        return Codes(
            parts[0].kind,
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            zeros,
            minima=torch.cat(minima) if minima else None,
        )


def _decoded(data: np.ndarray[Any, Any], kind: Any, *, keep: bool) -> Codes:
    """Return the codes of (rows, bytes) blocks; their values, with scales of one, if not `keep`."""
    if not keep:
        from gguf import dequantize

        values = torch.from_numpy(np.ascontiguousarray(dequantize(data, kind)))
        return Codes("int", values, torch.ones(values.shape[0], 1))
    rows = data.shape[0]
    size, read = _BLOCKS[kind.name]
    blocks = torch.from_numpy(data.view(np.uint8)).view(rows, -1, size)
    return read(blocks)


def _halves(blocks: Tensor) -> Tensor:
    """Return the numbers of (..., 16) bytes: 16 low nibbles, then the 16 high ones."""
    return torch.cat((blocks & 0x0F, blocks >> 4), dim=-1)


def _fp16(blocks: Tensor, first: int) -> Tensor:
    part: Tensor = blocks[..., first : first + 2].contiguous().view(torch.float16)
    return part[..., 0]


def _q4_0(blocks: Tensor) -> Codes:
    codes = _halves(blocks[..., 2:]).flatten(1).to(torch.int8) - 8
    return Codes("int", codes, _fp16(blocks, 0))


def _q4_1(blocks: Tensor) -> Codes:
    codes = _halves(blocks[..., 4:]).flatten(1)
    return Codes("int", codes, _fp16(blocks, 0), minima=_fp16(blocks, 2))


def _q5_0(blocks: Tensor) -> Codes:
    bits = blocks[..., 2:6].contiguous().view(torch.int32)  # one fifth bit for each number
    fifth = (bits >> torch.arange(_BLOCK, dtype=torch.int32)) & 1
    codes = _halves(blocks[..., 6:]).to(torch.int32) + 16 * fifth - 16
    return Codes("int", codes.flatten(1).to(torch.int8), _fp16(blocks, 0))


def _q8_0(blocks: Tensor) -> Codes:
    return Codes("int", blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _fp16(blocks, 0))


def _mxfp4(blocks: Tensor) -> Codes:
    return Codes("mxfp4", _halves(blocks[..., 1:]).flatten(1), blocks[..., 0].contiguous())


_FORMATS = {
    "Q4_0": "int4-g32", "Q4_1": "int4z-g32", "Q5_0": "int8-g32", "Q8_0": "int8-g32",
    "MXFP4": "mxfp4",
}  # fmt: skip
# Bytes of a block of 32 numbers, and what reads it.
_BLOCKS: dict[str, tuple[int, Callable[[Tensor], Codes]]] = {
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q8_0": (34, _q8_0),
    "MXFP4": (17, _mxfp4),
}  # fmt: skip
