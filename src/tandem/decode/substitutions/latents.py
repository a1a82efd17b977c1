"""Latent attention (DeepSeek, GLM, Kimi, Mistral) over a KV cache that keeps the latents.

Modules of this kind expand latents to keys and values in the method `expand_kv`, which is the same
in all of Transformers' models. In a shallow copy this method returns the latents unexpanded, and
`attend_latents` attends to them. In a decode step, queries are multiplied by the matrices of keys,
and the attended latents by the matrices of values, for each head.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.decode.substitutions.substitution import Substitution, has
from tandem.devices.cuda.linear import DeviceLinear
from tandem.foreign_types import ModelPart
from tandem.hf.packed_layers import PackedLinear, read_rows
from tandem.kernels.dense import DenseWeight, multiply_groups, pack_dense
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, find_format
from tandem.kernels.opaque_calls import GROUPS, opaque
from tandem.kv_cache.attention_call import AttentionCall
from tandem.kv_cache.base import SlotCache, current_cache
from tandem.kv_cache.latents import Expansion

_has_names = has("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")


def _is_known(module: ModelPart) -> bool:
    if not _has_names(module):
        return False
    kinds = (nn.Linear, PackedLinear, DeviceLinear)
    return type(module.kv_b_proj) in kinds and module.kv_b_proj.bias is None


def has_latents(module: nn.Module, cache: SlotCache) -> bool:
    """Tell whether a copied module passes its latents to a KV cache that keeps latents."""
    return cache.keeps_latents and "expand_kv" in vars(module)


def _keep_latents(self: ModelPart, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return latents (b, 1, n, latent + rotary) as keys and (b, 1, n, latent) as values.

    None outside Tandem's steps, and if the step's KV cache keeps no latents; the model's own code
    must then expand them.
    """
    cache = current_cache()
    if cache is None or not cache.keeps_latents:
        return None
    return torch.cat([latents, rotary], dim=-1), latents


LATENTS = Substitution(_is_known, _keep_latents, "expand_kv")


def attend_latents(module: ModelPart, cache: SlotCache, call: AttentionCall) -> Tensor:
    """Attend as `SlotCache.attend` does, with the tensors that `_keep_latents` returned.

    The call's query must be the model's own, for expanded keys; the call's form must describe the
    latents, one KV head. Returns the result for expanded values, (n_tokens, heads, value dim).
    """
    if cache.shares_values:
        call = call._replace(value=call.value[..., :0])
    form, query = call.form, call.query
    expanded = dataclasses.replace(
        form, num_kv_heads=form.num_heads, key_dim=query.shape[-1], value_dim=module.v_head_dim
    )
    if not cache.absorbs(form, expanded):
        return cache.attend_expanded(
            call, Expansion(expanded, query.dtype, partial(_expand, module))
        )
    num_plain = module.qk_nope_head_dim
    by_head = _products(module, form.num_heads)
    of_tokens = query.transpose(0, 1)  # (n_tokens, heads, key dim)
    absorbed = by_head.of_keys(of_tokens[..., :num_plain])
    query = torch.cat([absorbed, of_tokens[..., num_plain:]], dim=-1).transpose(0, 1)
    return by_head.of_values(cache.attend(call._replace(query=query)))


def _expand(module: ModelPart, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return expanded keys and values (heads, n, dim) of latents (n, latent + rotary)."""
    latents, rotary = kept[None, None].split(
        [module.kv_lora_rank, kept.shape[-1] - module.kv_lora_rank], dim=-1
    )
    own: Any = type(module)
    keys, values = own.expand_kv(module, latents, rotary)
    return keys[0], values[0]


class _Products(NamedTuple):
    """Multiplications of each head's vector by the head's matrices in `kv_b_proj`.

    Both functions map (n_tokens, heads, inputs) to (n_tokens, heads, outputs).
    """

    of_keys: Callable[[Tensor], Tensor]
    """Maps the part of a query without rotary embeddings to a query for latents."""
    of_values: Callable[[Tensor], Tensor]
    """Maps attention over latents to a head's result."""


def _products(module: ModelPart, num_heads: int) -> _Products:
    projection, num_plain = module.kv_b_proj, module.qk_nope_head_dim
    if isinstance(projection, PackedLinear):
        if projection.by_head is None:
            projection.by_head = _packed_by_head(projection, num_heads, num_plain)
        product = partial(opaque, GROUPS, multiply_groups, projection.threads)
        return _Products(*(partial(product, weights) for weights in projection.by_head))
    is_packed = isinstance(projection, DeviceLinear)
    weight = projection.unpacked if is_packed else projection.weight
    weight = weight.view(num_heads, -1, module.kv_lora_rank)
    keys, values = weight[:, :num_plain], weight[:, num_plain:]
    return _Products(partial(_product, keys), partial(_product, values.transpose(1, 2)))


def _product(weight: Tensor, x: Tensor) -> Tensor:
    """Multiply (n_tokens, heads, inputs) by plain weights (heads, inputs, outputs), by head."""
    return torch.matmul(x.transpose(0, 1), weight).transpose(0, 1)


def _packed_by_head(
    projection: PackedLinear, num_heads: int, num_plain: int
) -> tuple[list[DenseWeight], list[DenseWeight]]:
    """Return each head's matrix of keys, transposed, in bf16, and each head's matrix of values.

    Matrices of values stay in the projection's format, unless their rows do not fill whole blocks
    or their columns are reordered; these are converted to bf16, too.
    """
    each = projection.out_features // num_heads
    rows = torch.arange(projection.out_features, device="cpu").view(num_heads, each)
    keys = _values_of(projection, rows[:, :num_plain])  # (heads, plain, latent)
    of_keys = _bf16_by_head(keys.transpose(1, 2))
    if each % ROWS_PER_BLOCK or num_plain % ROWS_PER_BLOCK or projection.input_order is not None:
        return of_keys, _bf16_by_head(_values_of(projection, rows[:, num_plain:]))
    firsts = (head * each + num_plain for head in range(num_heads))
    return of_keys, [projection.packed.rows_at(first, each - num_plain) for first in firsts]


def _values_of(projection: PackedLinear, rows: Tensor) -> Tensor:
    """Return the given rows of a packed weight: (*rows.shape, in_features) bf16."""
    if projection.input_order is not None:
        return projection.values().bfloat16()[rows]
    return read_rows(projection.threads, projection.packed, torch.bfloat16, rows)


def _bf16_by_head(weight: Tensor) -> list[DenseWeight]:
    """Pack a weight (heads, outputs, inputs) as one bf16 matrix per head."""
    bf16, (num_heads, num_rows, _) = find_format("bf16"), weight.shape
    if num_rows % ROWS_PER_BLOCK:
        return [pack_dense(head, None, bf16) for head in weight]
    packed = pack_dense(weight.flatten(0, 1), None, bf16)
    return [packed.rows_at(head * num_rows, num_rows) for head in range(num_heads)]
