"""Attention with a distance bias that depends on each token's hidden state: Inkling and Inkling 2.

The models compute a matrix for all pairs of tokens in a sequence. A step of Tandem's has tokens of
several slots, so attention gets the inputs of the bias instead and computes it for each slot.
"""

import torch
from torch import Tensor
from transformers import DynamicCache

from tandem.decode.substitutions.attention import attention_forward
from tandem.decode.substitutions.substitution import Substitution, has
from tandem.foreign_types import ModelPart
from tandem.hf.compat import takes_cache
from tandem.kernels.attention import DistanceBias
from tandem.kv_cache.base import current_cache


@takes_cache
def _attention(
    self: ModelPart,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    conv_mask: object = None,
    cache: DynamicCache | None = None,
    **kwargs: object,
) -> tuple[Tensor, None] | None:
    """Attend as Inkling does, (b, n_tokens, width) in and out; only near tokens have a bias.

    None outside Tandem's steps, where the model's own code must run.
    """
    step = current_cache()
    if step is None or cache is None:
        return None
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    key = self.k_sconv(self.k_proj(hidden_states), cache=cache, conv_mask=conv_mask)
    value = self.v_sconv(self.v_proj(hidden_states), cache=cache, conv_mask=conv_mask)
    states = self.r_proj(hidden_states).view(*shape[:2], self.num_heads, -1).transpose(1, 2)
    query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    floor = self.config.log_scaling_n_floor
    if not self.is_sliding and floor is not None:
        ratio = (step.token_positions.view(shape[:2]) + 1).float() / floor
        factor = 1.0 + self.config.log_scaling_alpha * torch.log(ratio.clamp(min=1.0))
        query, states = (
            (x.float() * factor[:, None, :, None]).to(x.dtype) for x in (query, states)
        )
    key = self.k_norm(key.view(shape)).transpose(1, 2)
    value = value.view(shape).transpose(1, 2)
    cache.update(key, value, self.layer_idx)
    window, bias = self.sliding_window, DistanceBias(states, self.rel_logits_proj.proj)
    out, _ = attention_forward(
        self, query, key, value, attention_mask,
        scaling=self.scaling, sliding_window=window, position_bias=bias,
    )  # fmt: skip
    return self.o_proj(out.reshape(*shape[:2], -1)), None


def _position_bias(
    self: ModelPart, hidden_states: Tensor, relative_distance: object, position_ids: Tensor
) -> DistanceBias | None:
    """Return the inputs from which attention computes Inkling 2's bias.

    None outside Tandem's steps, where the model's own code must run.
    """
    if current_cache() is None:
        return None
    states = self.linear(hidden_states).view(*hidden_states.shape[:-1], self.num_heads, -1)
    return DistanceBias(self.norm(states, position_ids).transpose(1, 2), self.proj)


def _relative_distance(inputs_embeds: Tensor, *args: object, **kwargs: object) -> Tensor | None:
    """Return an empty tensor, because Tandem's bias reads no matrix of distances.

    None outside Tandem's steps, where the model's own code must run.
    """
    return None if current_cache() is None else inputs_embeds.new_empty(0)


DISTANCES = {"get_relative_distance": _relative_distance}
"""Maps the name of a function in Inkling 2's model file to its substitute."""
POSITION_BIAS = Substitution(has("linear", "norm", "proj", "rel_extent"), _position_bias)
ATTENTION = Substitution(
    has("rel_logits_proj", "r_proj", "k_sconv", "v_sconv", "q_norm", "k_norm"), _attention
)
