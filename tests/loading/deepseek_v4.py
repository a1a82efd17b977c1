"""A tiny DeepSeek-V4 in its released form: names, config, FP8 and e2m1.

Linear layers are e4m3 with an E8M0 scale per 128 x 128 block. Experts are e2m1, two codes a byte,
with an E8M0 scale per 32 inputs. The MTP layer has the prefix `mtp.0.`. The decoder here is plain
torch, independent of Tandem.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.architectures import build_tiny_model
from tests.hf.tiny import byte_tokenizer

NUM_LAYERS = 4
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST_E4M3 = 448.0
_IN_FP8 = re.compile(
    r".*(\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|shared_experts\.w[123]|\.[eh]_proj)\.weight"
)
_EXPERT = re.compile(r".*\.ffn\.experts\.\d+\.w[123]\.weight")
_IN_BF16 = re.compile(r".*(norm|compressor\.w\w+|weights_proj|gate|embed|head)\.weight")
# What config.json says under the names of the release.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "compress_ratios": [0, 4, 128, 4, 0], "compress_rope_theta": 160000, "hc_eps": 1e-06,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 192, "index_head_dim": 32, "index_n_heads": 8, "index_topk": 4,
    "initializer_range": 0.02, "max_position_embeddings": 4096, "moe_intermediate_size": 160,
    "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hash_layers": 2,
    "num_hidden_layers": NUM_LAYERS, "num_key_value_heads": 1, "num_nextn_predict_layers": 1,
    "o_groups": 2, "o_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.5,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 256,
        "type": "yarn",
    },
    "scoring_func": "sqrtsoftplus", "sliding_window": 8, "swiglu_limit": 0.5,
    "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1", "use_cache": True, "vocab_size": 128,
}  # fmt: skip
QUANTIZATION = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
_KINDS = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}


def tiny_model(config: Mapping[str, Any] = CONFIG) -> Any:
    """Return the model of a released config; its MTP layer is an additional layer."""
    kinds = [_KINDS[ratio] for ratio in config["compress_ratios"]]
    num_hash = config["num_hash_layers"]
    lists = {
        "layer_types": kinds,
        "mlp_layer_types": ["hash_moe"] * num_hash + ["moe"] * (len(kinds) - num_hash),
        "num_hidden_layers": len(kinds),
    }
    without = ("architectures", "model_type", "transformers_version", "torch_dtype")
    values = {key: value for key, value in config.items() if key not in without}
    return build_tiny_model("deepseek_v4", values=values | lists)


def released_tensors(directory: Path, model: Any) -> dict[str, Tensor]:
    """Return a model's tensors by the release's names; the last layer is the MTP layer."""
    model.save_pretrained(directory)
    tensors = as_released(load_file(directory / "model.safetensors"))
    last, width = f"layers.{NUM_LAYERS}.", model.config.hidden_size
    tensors = {name.replace(last, "mtp.0."): x for name, x in tensors.items()}
    random = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    for name in ("hc_head_fn", "hc_head_base", "hc_head_scale"):
        tensors[f"mtp.0.{name}"] = tensors[name] + 0.1 * noise(*tensors[name].shape)
    for name in ("enorm", "hnorm", "norm"):
        tensors[f"mtp.0.{name}.weight"] = 1 + 0.1 * noise(width)
    for name in ("e_proj", "h_proj"):
        tensors[f"mtp.0.{name}.weight"] = noise(width, width) / width**0.5
    return tensors


def as_released(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of Transformers renamed to the release's names."""
    found = {}
    for name, tensor in tensors.items():
        released = name.removeprefix("model.").replace("embed_tokens.", "embed.")
        released = released.replace("hc_head.hc_", "hc_head_").replace(
            ".attn.norm.", ".attn.kv_norm."
        )
        found[released] = tensor
    return found


def write_released(
    directory: Path, tensors: Mapping[str, Tensor], *, experts: str = "e2m1", **changes: Any
) -> Path:
    """Write a released checkpoint; `experts` may also be "e4m3", as in the base model."""
    config = CONFIG | {"quantization_config": QUANTIZATION} | changes
    if experts == "e2m1":
        config["expert_dtype"] = "fp4"
    _write(directory, config, quantised(tensors, experts))
    byte_tokenizer().save_pretrained(directory)
    return directory


def write_decoded(directory: Path, released: Path) -> Path:
    """Write a released checkpoint's values in fp32, which Transformers itself can read."""
    config = json.loads((released / "config.json").read_text())
    config.pop("quantization_config")
    config.pop("expert_dtype", None)
    tensors = load_file(released / "model.safetensors")
    decoded = {
        name: decoded_weight(tensor, tensors.get(f"{name.removesuffix('.weight')}.scale"))
        for name, tensor in tensors.items()
        if not name.endswith(".scale")
    }
    _write(directory, config | {"torch_dtype": "float32"}, decoded)
    return directory


def decoded_weight(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Return a tensor's values, decoded if it has codes with E8M0 scales."""
    if scales is None:
        return codes.float() if codes.is_floating_point() else codes
    factors = torch.exp2(scales.view(torch.uint8).float() - 127)
    if codes.dtype == torch.int8:
        halves = torch.stack((codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4), dim=-1)
        return torch.cat((E2M1, -E2M1))[halves.flatten(1).long()] * factors.repeat_interleave(32, 1)
    rows, cols = codes.shape
    spread = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * spread[:rows, :cols]


def quantised(
    tensors: Mapping[str, Tensor], experts: str = "e2m1", *, is_all: bool = True
) -> dict[str, Tensor]:
    """Return tensors in the release's types; unless `is_all`, linear layers stay plain."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_expert = _EXPERT.fullmatch(name) is not None
        is_linear = _IN_FP8.fullmatch(name) is not None
        if not is_expert and not (is_all and is_linear):
            is_short = is_linear or _IN_BF16.fullmatch(name)
            found[name] = tensor.bfloat16() if is_short else tensor
            continue
        encode = as_e2m1 if is_expert and experts == "e2m1" else as_e4m3
        found[name], found[f"{name.removesuffix('.weight')}.scale"] = encode(tensor)
    return found


def as_e2m1(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes (rows, cols / 2) and E8M0 scales (rows, cols / 32)."""
    groups = weight.float().unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / E2M1[-1]).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    halves = codes.flatten(1).unflatten(1, (-1, 2)).to(torch.uint8)
    return (halves[..., 0] | halves[..., 1] << 4).view(torch.int8), _e8m0(exponents)


def as_e4m3(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes and E8M0 scales (rows / 128, cols / 128), rounded up."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % 128, 0, -rows % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    exponents = (blocks.abs().amax((1, 3)) / _LARGEST_E4M3).log2().ceil()
    spread = exponents.exp2().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (weight / spread[:rows, :cols]).to(torch.float8_e4m3fn), _e8m0(exponents)


def _e8m0(exponents: Tensor) -> Tensor:
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
