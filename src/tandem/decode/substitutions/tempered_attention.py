"""Attention whose queries are scaled by their position (Llama 4), for tokens of any slots.

The model's own code reads the positions from its KV cache, which assumes sequences of equal length.
"""

import torch
from torch import Tensor
from transformers import DynamicCache

from tandem.decode.substitutions.attention import attention_forward
from tandem.decode.substitutions.substitution import Substitution, has
from tandem.foreign_types import ModelPart
from tandem.hf.compat import takes_cache
from tandem.kv_cache.base import current_cache

_has_names = has("attn_temperature_tuning", "floor_scale", "attn_scale", "use_rope")


def _is_tempered(module: ModelPart) -> bool:
    return _has_names(module) and bool(module.attn_temperature_tuning) and not module.use_rope


@takes_cache
def _attend(
    self: ModelPart,
    hidden_states: Tensor,
    position_embeddings: object,
    attention_mask: Tensor | None,
    cache: DynamicCache | None = None,
    **kwargs: object,
) -> tuple[Tensor, None] | None:
    """Attend without rotary embeddings, (b, n_tokens, width) in and out.

    None outside Tandem's steps, where the model's own code must run.
    """
    slots = current_cache()
    if slots is None or cache is None:
        return None
    lead = hidden_states.shape[:-1]
    query, key, value = (
        projection(hidden_states).view(*lead, -1, self.head_dim)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    steps = torch.floor((slots.token_positions.float() + 1.0) / self.floor_scale)
    scale = torch.log1p(steps) * self.attn_scale + 1.0
    query = (query * scale.view(*lead, 1, 1)).to(query.dtype).transpose(1, 2)
    key, value = cache.update(key.transpose(1, 2), value.transpose(1, 2), self.layer_idx)
    out, _ = attention_forward(self, query, key, value, attention_mask, scaling=self.scaling)
    return self.o_proj(out.reshape(*lead, -1)), None


ATTENTION = Substitution(_is_tempered, _attend)
