"""Tests of latent attention in a GPU's slots: steps and prompts share one copy of the latents."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tandem.decode.cuda.slots import CudaSlotPool
from tandem.decode.padded import PaddedBatch
from tandem.devices.cuda.linear import DeviceLinear
from tandem.kernels.dense import pack_dense
from tandem.kernels.formats.weight_format import find_format
from tandem.kv_cache.cuda import cache
from tests.architectures import build_tiny_model
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import close, require_alike

PROMPTS = [[40, 41, 42, 43, 44], [50]]


def require_latents(model: Any, most: float, **options: Any) -> CudaSlotPool:
    """Compare prompts and steps with those of Transformers' caches."""
    pool = CudaSlotPool(model, 2, capacity=20, make_capture=TwinCapture, **options)
    require_alike(pool, model, PROMPTS, most=most)
    close(pool.prefill({0: [7, 8]}), prefill_again(model, pool.held(0)), most)
    return pool


def prefill_again(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    return PaddedBatch(model, [list(tokens)], 0).prefill()


def kept_bytes(model: Any, itemsize: int = 4) -> int:
    """Return the bytes of a token: a latent and a rotary key in each layer."""
    config = model.config
    return (config.kv_lora_rank + config.qk_rope_head_dim) * itemsize * config.num_hidden_layers


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"])
def test_steps_are_transformers_own_in_torch(name: str) -> None:
    model: Any = build_tiny_model(name)
    pool = require_latents(model, 1e-4)
    assert pool.cache.num_bytes == 2 * pool.cache.capacity * kept_bytes(model)


@pytest.mark.parametrize(("kv_dtype", "most"), [("auto", 1e-4), ("int8", 0.03)])
def test_steps_are_transformers_own_by_the_kernels(
    kv_dtype: str, most: float, find_kernels: Any
) -> None:
    model: Any = build_tiny_model("deepseek_v3", values={"num_hidden_layers": 2})
    pool = require_latents(model, most, find_kernels=find_kernels, kv_dtype=kv_dtype)
    scales = 4 * model.config.num_hidden_layers
    expected = kept_bytes(model) if kv_dtype == "auto" else kept_bytes(model, 1) + scales
    assert pool.cache.num_bytes == 2 * pool.cache.capacity * expected


def test_a_packed_projection_is_absorbed_unpacked(find_kernels: Any) -> None:
    from tandem.triton_kernels.dense import copy_to_device

    model: Any = build_tiny_model("deepseek_v3", values={"num_hidden_layers": 2})
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            weight = module.kv_b_proj.weight
            packed = copy_to_device(
                pack_dense(weight, None, find_format("int8-g32")), torch.device("cpu")
            )
            module.kv_b_proj = DeviceLinear(packed, weight.dtype)
    pool = require_latents(model, 1e-4, find_kernels=find_kernels)
    assert pool.cache.num_bytes == 2 * pool.cache.capacity * kept_bytes(model)


def test_few_tokens_after_a_long_text_attend_to_latents_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"num_hidden_layers": 2, "kv_lora_rank": 32}
    model: Any = build_tiny_model("deepseek_v3", values=values)
    text = [40 + i % 70 for i in range(140)]
    calls = {"latents": 0, "expanded": 0}
    pool = CudaSlotPool(model, 1)
    for name, kind in (("attend_to_latents", "latents"), ("attend_in_prompt", "expanded")):
        right = getattr(cache, name)

        def counted(*args: Any, right: Any = right, kind: str = kind) -> torch.Tensor:
            calls[kind] += 1
            result: torch.Tensor = right(*args)
            return result

        monkeypatch.setattr(cache, name, counted)
    config = model.config
    rank, of_keys = config.kv_lora_rank, config.qk_nope_head_dim
    # Operations per head and position: to expand it, and the additional ones of each token.
    most = rank * (of_keys + config.v_head_dim) // (2 * rank - of_keys - config.v_head_dim)
    begins = [0, 60, 60 + most - 1, 60 + 2 * most - 1]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
        logits = pool.prefill({0: text[begin:end]})
        close(logits, prefill_again(model, text[:end]), 1e-4)
    assert len(text) - begins[-1] < most == 32
    assert calls == {"latents": 4, "expanded": 4}
