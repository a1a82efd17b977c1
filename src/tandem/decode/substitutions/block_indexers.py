"""Indexers that select blocks of positions (Qwen4, GLM-5.3-Flash, MiniMax-M3), for any slots.

The models' code pools the keys of whole blocks and scores the blocks. A token attends to the best
blocks and to the positions after the last whole block. That code handles one sequence at a time, so
in a shallow copy the functions here replace it, for modules of exactly these forms.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from tandem.decode.substitutions.rotary import rotary_of
from tandem.decode.substitutions.substitution import Substitution, has
from tandem.foreign_types import ModelPart
from tandem.hf.compat import takes_cache
from tandem.kv_cache.index_keys import Selection
from tandem.kv_cache.indexers import SelectedPositions

_is_qwen4 = has("index_qk_proj", "q_layernorm", "k_layernorm", "block_topk", "compress_ratio")
_has_m3 = has("q_proj", "k_proj", "q_norm", "k_norm", "block_size", "topk_blocks", "local_blocks")
_has_glm5 = has("wq_b", "wk", "k_norm", "weights_proj", "index_kpool", "index_kpool_compress_gate")


def _is_glm5(module: ModelPart) -> bool:
    return _has_glm5(module) and bool(module.index_kpool_always_select_tail)


def _is_m3(module: ModelPart) -> bool:
    return _has_m3(module) and module.num_heads == module.config.num_key_value_heads


@takes_cache
def _select_qwen4(
    self: ModelPart,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: object,
    cache: DynamicCache,
) -> SelectedPositions:
    """Select blocks as Qwen4 does: score a block by its mean key, normalised and rotated.

    The mean key is rotated for the block's first position. Returns the selected positions.
    """
    rotate = rotary_of(self)
    cos, sin = position_embeddings  # (b, n_tokens, width)
    shape = (*hidden_states.shape[:2], -1, self.index_head_dim)
    widths = [n * self.index_head_dim for n in (self.index_n_heads, self.index_kv_heads)]
    query, key = (
        part.reshape(shape) for part in self.index_qk_proj(hidden_states).split(widths, dim=-1)
    )
    query = rotate(self.q_layernorm(query), cos=cos, sin=sin, unsqueeze_dim=2)
    dim, width, dtype = self.index_head_dim, cos.shape[-1], key.dtype

    def pool(blocks: Tensor) -> Tensor:
        keys, cos, sin = blocks.split([dim, width, width], dim=-1)  # (n_blocks, block, dim)
        pooled = self.k_layernorm(keys.mean(dim=1).to(dtype))[:, None]
        turned: Tensor = rotate(pooled, cos=cos[:, 0].to(dtype), sin=sin[:, 0].to(dtype))
        return turned[:, 0]

    selection = Selection.of_blocks(1 / math.sqrt(dim), self.block_topk, self.compress_ratio)
    packed = torch.cat([key.squeeze(2), cos, sin], dim=-1)
    layer = cache.layers[self.layer_idx]
    return SelectedPositions(layer.select(selection, packed, query, None, pool))


@takes_cache
def _select_glm5(
    self: ModelPart,
    hidden_states: Tensor,
    q_resid: Tensor,
    attention_mask: object,
    cache: DynamicCache,
) -> Tensor:
    """Select blocks as GLM-5.3-Flash does: score a block by a weighted sum of its keys.

    The sum's weights are a softmax, over the positions of the block, of each token's gate plus a
    bias for its place in the block. Returns the selected positions.
    """
    dim, dtype = self.head_dim, hidden_states.dtype
    query = self.wq_b(q_resid).view(*hidden_states.shape[:2], -1, dim)
    key = self.k_norm(self.wk(hidden_states))
    gate = F.linear(hidden_states, self.index_kpool_compress_gate)
    weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()

    def pool(blocks: Tensor) -> Tensor:
        keys, gates = blocks.split([dim, dim], dim=-1)  # (n_blocks, block, dim)
        shares = (gates + self.index_kpool_compress_ape.float()).softmax(dim=1).to(dtype)
        pooled: Tensor = (shares * keys.to(dtype)).sum(dim=1)
        return pooled

    selection = Selection.of_blocks(
        self.softmax_scale, self.index_topk // self.index_kpool, self.index_kpool
    )
    layer = cache.layers[self.layer_idx]
    packed = torch.cat([key, gate], dim=-1)
    selected: Tensor = layer.select(selection, packed, query, weights * self.n_heads**-0.5, pool)
    return selected


@takes_cache
def _select_m3(
    self: ModelPart,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: DynamicCache,
    position_ids: Tensor,
) -> SelectedPositions:
    """Select blocks as MiniMax-M3 does: for each KV head, score a block by its best key."""
    shape = (*hidden_states.shape[:2], -1, self.head_dim)
    query = self.q_norm(self.q_proj(hidden_states).view(shape))
    key = self.k_norm(self.k_proj(hidden_states).view(shape))
    cos, sin = (x[..., : self.head_dim] for x in position_embeddings)
    query, key = rotary_of(self)(query, key, cos=cos, sin=sin, unsqueeze_dim=2)
    selection = Selection.of_heads(1.0, self.topk_blocks, self.block_size, self.local_blocks)
    layer = cache.layers[self.layer_idx]
    selected = layer.select(selection, key.squeeze(2), query, None)
    return SelectedPositions(selected, self.block_size)


def _positions_as_mask(
    self: ModelPart, topk_indices: Tensor, query_states: Tensor, kv_length: int
) -> SelectedPositions:
    return SelectedPositions(topk_indices)


QWEN4 = Substitution(_is_qwen4, _select_qwen4)
M3 = Substitution(_is_m3, _select_m3)
GLM5 = Substitution(_is_glm5, _select_glm5)
POSITIONS_AS_MASK = Substitution(
    has("build_attention_mask_from_topk"), _positions_as_mask, "build_attention_mask_from_topk"
)
