"""Tiny checkpoints in the formats of quantised models, and the same models with plain weights.

They follow the formats' public descriptions. test_library_weights.py checks the reader with files
of the formats' own libraries.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.checkpoint.sources.files import open_tensors
from tandem.checkpoint.sources.source import READERS
from tests.architectures import build_tiny_model

GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Writer = Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Format:
    """How a format stores a linear layer's weight, and its part of config.json."""

    write: Writer
    config: dict[str, Any]
    architecture: str = "qwen3_moe"


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack unsigned codes (n, m) along the last axis, lowest bits first."""
    parts = codes.to(torch.int64).unflatten(-1, (-1, 32 // bits))
    words = sum(parts[..., i] << (bits * i) for i in range(32 // bits))
    assert isinstance(words, Tensor)
    return words.to(torch.int64).where(words < 1 << 31, words - (1 << 32)).to(torch.int32)


def round_to_groups(weight: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, ...]:
    """Return unsigned codes (rows, cols), scales and zero points (rows, groups)."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    highest, middle = (1 << bits) - 1, 1 << (bits - 1)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        scales = (2 * torch.maximum(-low, high) / highest).half().float()
        zeros = torch.full_like(scales, middle)
    else:
        scales = ((high - low) / highest).half().float()
        zeros = (-low / scales).round().clamp(0, highest)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, highest)
    return codes.flatten(1), scales, zeros


def gptq(
    weight: Tensor, *, symmetric: bool = True, order: Tensor | None = None
) -> dict[str, Tensor]:
    cols = weight.shape[1]
    order = torch.arange(cols) if order is None else order
    codes, scales, zeros = round_to_groups(weight[:, order], 4, symmetric=symmetric)
    of_input, group_of_input = torch.empty_like(codes), torch.empty(cols, dtype=torch.int32)
    of_input[:, order] = codes
    group_of_input[order] = torch.arange(cols, dtype=torch.int32) // GROUP
    return {
        "qweight": pack_words(of_input, 4).T.contiguous(),
        "qzeros": pack_words(zeros.T.contiguous() - 1, 4),
        "scales": scales.T.half().contiguous(),
        "g_idx": group_of_input,
    }


def gptq_in_order(weight: Tensor) -> dict[str, Tensor]:
    """Return GPTQ with one input order per width: an expert's gate and up must share it."""
    random = torch.Generator().manual_seed(weight.shape[1])
    return gptq(weight, order=torch.randperm(weight.shape[1], generator=random))


def awq(weight: Tensor) -> dict[str, Tensor]:
    codes, scales, zeros = round_to_groups(weight, 4, symmetric=False)

    def packed(numbers: Tensor) -> Tensor:  # (n, outputs)
        return pack_words(numbers.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2), 4)

    return {
        "qweight": packed(codes.T.contiguous()),
        "qzeros": packed(zeros.T.contiguous()),
        "scales": scales.T.half().contiguous(),
    }


def packed_integers(weight: Tensor, bits: int) -> dict[str, Tensor]:
    codes, scales, _ = round_to_groups(weight, bits, symmetric=True)
    return {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }


def block_fp8(weight: Tensor) -> dict[str, Tensor]:
    rows, cols = (-(-size // 128) for size in weight.shape)
    scales = torch.rand(rows, cols) + 0.5
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes = (weight.float() / spread[: weight.shape[0], : weight.shape[1]]).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}


def row_fp8(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (weight.float() / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def _packed_config(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def nvfp4(weight: Tensor, *, is_modelopt: bool) -> dict[str, Tensor]:
    """Return NVFP4 as compressed-tensors or ModelOpt writes it: random codes, suitable scales."""
    rows, cols = weight.shape
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
    scales = torch.rand(rows, cols // 16).add(0.5).to(torch.float8_e4m3fn)
    factor = weight.float().std() / 3
    if is_modelopt:
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}
    one = factor.reciprocal().reshape(1)
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": one}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

FORMATS = {
    "gptq": Format(gptq, _GPTQ, "mixtral"),
    "gptq-zeros": Format(lambda weight: gptq(weight, symmetric=False), _GPTQ | {"sym": False}),
    "gptq-order": Format(gptq_in_order, _GPTQ | {"desc_act": True}),
    "awq": Format(awq, _AWQ),
    "packed-int4": Format(lambda weight: packed_integers(weight, 4), _packed_config(4)),
    "packed-int8": Format(lambda weight: packed_integers(weight, 8), _packed_config(8)),
    "fp8": Format(block_fp8, _FP8, "deepseek_v3"),
    "nvfp4": Format(
        lambda weight: nvfp4(weight, is_modelopt=False),
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
    "modelopt-nvfp4": Format(
        lambda weight: nvfp4(weight, is_modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
}


def is_quantised(name: str) -> bool:
    """Tell whether a quantised checkpoint has codes for a weight: experts and attention."""
    return name.endswith("proj.weight") or (".experts." in name and name.endswith(".weight"))


def write_plain(directory: Path, architecture: str, **values: int) -> Path:
    """Write a tiny model in one bf16 file; `values` override config values."""
    build_tiny_model(architecture, values=values).bfloat16().save_pretrained(directory)
    return directory


def write_quantised(directory: Path, plain: Path, fmt: Format) -> Path:
    """Write a plain checkpoint's model in a quantised format."""
    tensors: dict[str, Tensor] = {}
    torch.manual_seed(0)
    for name, tensor in load_file(plain / "model.safetensors").items():
        if is_quantised(name):
            prefix = name.removesuffix(".weight")
            tensors |= {f"{prefix}.{part}": t for part, t in fmt.write(tensor).items()}
        else:
            tensors[name] = tensor
    _write(directory, plain, tensors, quantization_config=fmt.config)
    return directory


def write_decoded(directory: Path, quantised: Path) -> Path:
    """Write a quantised checkpoint's values as a plain fp32 checkpoint."""
    config = json.loads((quantised / "config.json").read_text())["quantization_config"]
    files = open_tensors(quantised)
    found = READERS[config["quant_method"]](files, config)
    tensors = {n: files.read(n).float() for n in files.entries if n not in found.parts}
    for name, weight in found.weights.items():
        tensors[name] = weight.read().values(name)
    _write(directory, quantised, tensors, dtype="float32")
    return directory


def _write(directory: Path, like: Path, tensors: dict[str, Tensor], **changes: Any) -> None:
    directory.mkdir(parents=True)
    config = json.loads((like / "config.json").read_text())
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config | changes))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def lose_tensors(directory: Path, prefix: str) -> None:
    """Write a checkpoint again as one file, without the tensors of a prefix."""
    files = sorted(directory.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for file in [*files, *directory.glob("*.index.json")]:
        file.unlink()
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    assert len(kept) < len(tensors)
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
