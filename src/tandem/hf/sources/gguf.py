"""GGUF files of Mixture-of-Experts models: blocks that map onto packed formats keep their codes.

The names of tensors come from Transformers and the gguf package. Of a layer's experts, gate and up
are tensors of their own, (num_experts, rows, cols) in blocks along the columns.
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
from tandem.hf.sources.gguf_config import ARCHITECTURES, Architecture, GgufHeader
from tandem.hf.sources.source import Source
from tandem.kernels.formats import WeightFormat, find_format

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK = 32
_UNREADABLE = "{file} cannot be read as GGUF ({reason}); download it again"
_LATENT_KEYS = "attn_k_b."
# Of the experts' first projection, and the biases that follow their rows.
_GATE, _UP = "_gate_exps", "_up_exps"


def read_gguf_header(file: Path) -> GgufHeader:
    """Read what a GGUF file holds; its tensors stay unread.

    Raises `ModelError` for a damaged file and `UnsupportedModelError` for an architecture that is
    not read.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnsupportedModelError(
            f"{file} needs the gguf package, which is not installed; pip install gguf"
        ) from error
    from transformers.modeling_gguf_pytorch_utils import read_field

    try:
        reader = GGUFReader(file)
        architecture = str(read_field(reader, "general.architecture")[0])
    except (ValueError, IndexError, KeyError, OSError, TypeError) as error:
        raise ModelError(_UNREADABLE.format(file=file, reason=error)) from error
    header = GgufHeader(
        file, architecture, reader.fields, {tensor.name: tensor for tensor in reader.tensors}
    )
    if architecture not in ARCHITECTURES or header.expert_width is None:
        what = architecture if architecture not in ARCHITECTURES else f"{architecture} (no experts)"
        raise UnsupportedModelError(
            f"{file} is of architecture {what!r}; of GGUF Tandem reads models with experts of "
            f"{', '.join(ARCHITECTURES)}: use the model's safetensors instead"
        )
    _require_whole(header)
    return header


def open_gguf(
    file: Path, model_of: Callable[[Any], Any], *, adapt: Callable[[Any], None] = lambda _: None
) -> tuple[Any, Source]:
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


def _require_whole(header: GgufHeader) -> None:
    size = header.file.stat().st_size
    ends = (int(t.data_offset) + int(t.n_bytes) for t in header.tensors.values())
    end = max(ends, default=0)
    if size < end:
        raise ModelError(f"{header.file} has {size} bytes, expected {end}; download it again")


def _dense_dtype(header: GgufHeader) -> torch.dtype:
    """Return the dtype of what is in no blocks: a file of fp16 keeps it, else it is bf16."""
    kinds = {t.tensor_type.name for t in header.tensors.values() if len(t.shape) > 1}
    return torch.float16 if "F16" in kinds and kinds <= {"F16", "F32"} else torch.bfloat16


def _source(
    header: GgufHeader, names: Mapping[str, str], shapes: Mapping[str, torch.Size], config: Any
) -> Source:
    """Return the file's tensors by Transformers' names."""
    architecture = ARCHITECTURES[header.architecture]
    weights: dict[str, StoredWeight] = {}
    plain: dict[str, Any] = {}
    for name in header.tensors:
        target = _target(name, names)
        if target not in shapes or target in weights or target in plain:
            continue  # such as rope frequencies, which Transformers computes; up, which is in gate
        parts = tuple(header.tensors[part] for part in _parts(name))
        joined = GgufWeight(
            name=target,
            tensors=parts,
            is_interleaved=architecture.is_interleaved,
            row_order=_row_order(name, architecture, config),
        )
        if all(part.tensor_type.name in _DTYPES for part in parts):
            plain[target] = PlainTensor(joined, shapes[target])
        else:
            weights[target] = joined
    plain |= _latents(header, names)
    return Source("gguf", weights, plain)


def _latents(header: GgufHeader, names: Mapping[str, str]) -> dict[str, Any]:
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
    if kind == "bias" and stem in names:
        return f"{names[stem]}_bias"
    if stem.endswith("exp_probs_b") and name not in names:  # DeepSeek's
        return f"model.layers.{name.split('.')[1]}.mlp.gate.e_score_correction_bias"
    return names.get(name) or names.get(stem, "")


def _parts(name: str) -> list[str]:
    """Return the names of the tensors that make one with this: itself, or gate and up."""
    for present in (_GATE, _UP):
        if present in name:
            return [name.replace(present, _GATE), name.replace(present, _UP)]
    return [name]


def _row_order(name: str, architecture: Architecture, config: Any) -> Tensor | None:
    """Return which row of a file's matrix each row of Transformers' is; None: they are the same."""
    if not architecture.has_ordered_heads or not (".attn_q." in name or ".attn_k." in name):
        return None
    is_query = ".attn_q." in name
    heads = config.num_attention_heads if is_query else config.num_key_value_heads
    # llama.cpp turns pairs of neighbours, Transformers the two halves of a head.
    rows = torch.arange(heads * config.head_dim).view(heads, config.head_dim // 2, 2)
    return rows.transpose(1, 2).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeight:
    """A weight of one tensor, or of several whose rows follow each other (gate, then up)."""

    name: str
    tensors: tuple[Any, ...] = field(repr=False)
    is_interleaved: bool = False
    """Rows of several tensors take turns instead, and matrices of plain numbers are turned."""
    row_order: Tensor | None = field(default=None, repr=False)
    is_ordered: bool = False

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
        keep = bool(self.formats)
        parts = [
            _decoded(_rows_of(tensor, expert), tensor.tensor_type, keep=keep)
            for tensor in self.tensors
        ]
        minima = [part.minima for part in parts if part.minima is not None]
        return Codes(
            parts[0].kind,
            self.in_order([part.codes for part in parts]),
            self.in_order([part.scales for part in parts]),
            minima=self.in_order(minima) if minima else None,
        )

    def in_order(self, parts: list[Tensor], axis: int = 0) -> Tensor:
        """Join what each tensor has for its rows, along `axis`, in Transformers' order."""
        if len(parts) > 1:
            if self.is_interleaved:
                return torch.stack(parts, dim=axis + 1).flatten(axis, axis + 1)
            return torch.cat(parts, dim=axis)
        return parts[0] if self.row_order is None else parts[0][self.row_order]


class PlainTensor:
    """Numbers that are in no blocks, read when Transformers' loader indexes them."""

    def __init__(self, weight: GgufWeight, shape: torch.Size) -> None:
        """Stand for a weight, to be read in `shape`."""
        self.weight = weight
        self.shape = shape

    def __getitem__(self, index: Any) -> Tensor:
        parts = [_plain_values(tensor) for tensor in self.weight.tensors]
        axis = 1 if len(parts) > 1 else 0  # after the experts'
        values = self.weight.in_order(parts, axis)
        is_turned = values.dim() == 3 and self.weight.is_interleaved
        values = values.transpose(1, 2) if is_turned else values.reshape(self.shape)
        chosen: Tensor = values[index]
        return chosen


class HalvedLatent:
    """What makes keys and values from latents, stored as two tensors, the one for keys turned."""

    def __init__(self, keys: Any, values: Any) -> None:
        """Join (heads, latents, width of keys) and (heads, width of values, latents)."""
        self._keys, self._values = keys, values

    def __getitem__(self, index: Any) -> Tensor:
        keys, values = (_dequantised(tensor) for tensor in (self._keys, self._values))
        joined = torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
        chosen: Tensor = joined[index]
        return chosen


def _dequantised(tensor: Any) -> Tensor:
    if tensor.tensor_type.name in _DTYPES:
        return _plain_values(tensor)
    from gguf import dequantize

    return torch.from_numpy(np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type)))


def _plain_values(tensor: Any) -> Tensor:
    data = torch.from_numpy(np.array(tensor.data))  # a copy: the file is mapped for reading only
    dtype = _DTYPES[tensor.tensor_type.name]
    values = data if data.dtype == dtype else data.view(dtype)
    return values.view([int(size) for size in reversed(tensor.shape)])


def _rows_of(tensor: Any, expert: int | None) -> np.ndarray[Any, Any]:
    return np.array(tensor.data if expert is None else tensor.data[expert])


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
