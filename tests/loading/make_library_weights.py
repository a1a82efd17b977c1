"""Writes data/libraries.safetensors: weights stored and decoded by the formats' own libraries.

    python -m tests.loading.make_library_weights

Needs gptqmodel, autoawq and compressed-tensors, which CI does not install. For each case the file
has the library's tensors as `CASE/x.NAME` and their decoded values as `CASE/values`. Its metadata
has versions and configs.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FILE = Path(__file__).parent / "data" / "libraries.safetensors"
ROWS, COLS, GROUP = 32, 128, 32
Case = tuple[dict[str, Any], dict[str, Tensor]]


def random_weight() -> Tensor:
    return torch.randn(ROWS, COLS) * torch.rand(ROWS, 1) * 0.1


def scales_and_zeros(weight: Tensor, group_of_input: Tensor, bits: int, symmetric: bool) -> Any:
    """Return scales and zero points (rows, groups) that cover each group's range."""
    groups = int(group_of_input.max()) + 1
    highest, middle = (1 << bits) - 1, 1 << (bits - 1)
    scales, zeros = torch.empty(ROWS, groups), torch.empty(ROWS, groups)
    for group in range(groups):
        part = weight[:, group_of_input == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, group] = 2 * torch.maximum(-low, high) / highest
            zeros[:, group] = middle
        else:
            scales[:, group] = (high - low) / highest
            zeros[:, group] = (-low / scales[:, group]).round()
    return scales.half().float(), zeros


def gptq(bits: int, *, symmetric: bool, group: int = GROUP, has_order: bool = False) -> Case:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    weight = random_weight()
    group_of_input = torch.arange(COLS) // group
    if has_order:
        group_of_input = group_of_input[torch.randperm(COLS)]
    scales, zeros = scales_and_zeros(weight, group_of_input, bits, symmetric)
    linear = nn.Linear(COLS, ROWS, bias=False)
    linear.weight.data = weight
    layer = TorchLinear(
        bits=bits, group_size=group, sym=symmetric, desc_act=has_order, in_features=COLS,
        out_features=ROWS, register_buffers=True,
    )  # fmt: skip
    layer.pack_original(linear, scales, zeros, group_of_input.int())
    layer.post_init()
    layer.eval()
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
        "desc_act": has_order, "checkpoint_format": "gptq_v2",
    }  # fmt: skip
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {f"x.{name}": getattr(layer, name).detach().clone() for name in names}
    return config, tensors | {"values": layer.dequantize_weight().T.float()}


def awq() -> Case:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    weight = random_weight()
    linear = nn.Linear(COLS, ROWS, bias=False)
    linear.weight.data = weight
    scales, zeros = scales_and_zeros(weight, torch.arange(COLS) // GROUP, 4, symmetric=False)
    layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T, zeros=zeros.T)
    values = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, GROUP)
    config = {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm",
        "zero_point": True,
    }  # fmt: skip
    names = ("qweight", "qzeros", "scales")
    tensors = {f"x.{name}": getattr(layer, name).detach().clone() for name in names}
    return config, tensors | {"values": values.T.float()}


def compressed(bits: int, group: int | None, *, symmetric: bool, format_name: str) -> Case:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    args = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, group_size=group,
        strategy="group" if group else "channel",
    )  # fmt: skip
    weight = random_weight().bfloat16()
    grouped = weight.unflatten(1, (-1, group or COLS))
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    compressor = BaseCompressor.get_value_from_registry(format_name)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    stored = compressor.compress(state, scheme)
    values = compressor.decompress(stored, scheme)["weight"]
    group_config = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    config = {
        "quant_method": "compressed-tensors", "format": format_name,
        "config_groups": {"group_0": group_config}, "ignore": ["lm_head"],
    }  # fmt: skip
    return config, {f"x.{n}": t for n, t in stored.items()} | {"values": values.float()}


def main() -> None:
    torch.manual_seed(0)
    packed = "pack-quantized"
    cases = {
        "gptq-sym": gptq(4, symmetric=True),
        "gptq-zeros": gptq(4, symmetric=False),
        "gptq-order": gptq(4, symmetric=True, has_order=True),
        "gptq-8bit": gptq(8, symmetric=True),
        "gptq-one-group": gptq(4, symmetric=True, group=COLS),
        "awq": awq(),
        "packed-int4": compressed(4, GROUP, symmetric=True, format_name=packed),
        "packed-int4-zeros": compressed(4, GROUP, symmetric=False, format_name=packed),
        "packed-int4-rows": compressed(4, None, symmetric=True, format_name=packed),
        "packed-int8": compressed(8, GROUP, symmetric=True, format_name=packed),
        "plain-int8": compressed(8, None, symmetric=True, format_name="int-quantized"),
    }
    tensors = {
        f"{case}/{name}": tensor.contiguous()
        for case, (_, stored) in cases.items()
        for name, tensor in stored.items()
    }
    configs = {case: config for case, (config, _) in cases.items()}
    metadata = {"configs": json.dumps(configs), "versions": json.dumps(_versions())}
    FILE.parent.mkdir(exist_ok=True)
    save_file(tensors, FILE, metadata=metadata)


def _versions() -> dict[str, str]:
    import awq
    import compressed_tensors
    import gptqmodel

    modules = (awq, compressed_tensors, gptqmodel, torch)
    return {module.__name__: str(module.__version__) for module in modules}


if __name__ == "__main__":
    main()
