"""Layers that advance states in their own code (MiniMax, ZAYA and others), for any slots' tokens.

Unlike the layers in `recurrences`, these layers call no functions that can be replaced by name.
Therefore a whole method, mostly `forward`, is replaced.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache

from tandem.decode.substitutions.substitution import Substitution, has
from tandem.foreign_types import ModelPart
from tandem.hf.compat import takes_cache
from tandem.kernels.opaque_calls import NGRAMS, opaque
from tandem.kernels.recurrent import Convolution, Recurrence, RecurrenceForm
from tandem.kv_cache.base import NotInSlotsError
from tandem.kv_cache.states import StateHandle


def _handle(cache: DynamicCache | None, layer: int, number: int = 0) -> StateHandle:
    handle = cache.layers[layer].conv_states.get(number) if cache is not None else None
    if not isinstance(handle, StateHandle):
        raise NotInSlotsError("a layer keeps states that Tandem does not hold")
    return handle


@takes_cache
def _lightning_attention(
    self: ModelPart,
    hidden_states: Tensor,
    position_embeddings: object,
    attention_mask: object,
    cache: DynamicCache | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute MiniMax's linear attention, (b, n_tokens, width); each head has a fixed decay."""
    handle = _handle(cache, self.layer_idx)
    heads, dim = self.num_attention_heads, self.head_dim
    mixed = self.act_fn(self.qkv_proj(hidden_states)).view(-1, heads, 3 * dim)
    query, key, value = mixed.split(dim, dim=-1)
    decay = -self.slope_rate.float().flatten().expand(len(mixed), heads)
    form = RecurrenceForm(heads, heads, dim, dim, "head")
    inputs = (value, query, key, decay.contiguous())
    out = handle.advance("recurrence", lambda: Recurrence(form), *inputs)
    out = self.norm(out.view(*hidden_states.shape[:-1], heads * dim))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None


@takes_cache
def _convolved_projection(
    self: ModelPart, hidden_states: Tensor, cache: DynamicCache | None, conv_mask: object = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix queries and keys by two convolutions; half of each value is from the previous token.

    Returns queries, keys and values, each (b, n_tokens, heads, dim).
    """
    handle = _handle(cache, self.layer_idx)
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
    mixed = _convolved(self, handle, torch.cat([query, key], dim=-1).flatten(0, 1))
    mixed_query, mixed_key = mixed.split([query.shape[-1], key.shape[-1]], dim=-1)
    keys = key.view(shape).repeat_interleave(self.num_key_value_groups, dim=2)
    residual = (query.view(shape) + keys) * 0.5
    grouped = residual.view(*shape[:2], -1, self.num_key_value_groups, self.head_dim)
    delayed = self.v_proj_delayed(hidden_states)
    bias = self.v_proj_delayed.bias  # what a token of zeros before the first one would give
    before = _delayed(handle, "values", (delayed if bias is None else delayed - bias).flatten(0, 1))
    before = before.view(delayed.shape) if bias is None else before.view(delayed.shape) + bias
    value = torch.cat([self.v_proj_current(hidden_states), before], dim=-1)
    return (
        mixed_query.view(shape) + residual,
        mixed_key.view(shape) + grouped.mean(dim=-2),
        value.view(shape),
    )


def _convolved(self: ModelPart, handle: StateHandle, x: Tensor) -> Tensor:
    """Convolve each channel, then the channels of each head with each other: (n_tokens, channels).

    Zeros precede the first token. The first convolution turns these zeros into its bias, and the
    second convolution reads that bias.
    """
    first, second = self.conv_qk_depthwise, self.conv_qk_grouped
    new = _advanced(handle, "convolution", x, lambda: first.weight.squeeze(1))
    inputs = [new]
    for number in range(second.kernel_size[0] - 1):
        inputs.insert(0, _delayed(handle, f"mixed {number}", inputs[0]))
    groups, (channels, each, _) = second.groups, second.weight.shape
    # (groups, tokens, width * inputs of a group) @ (groups, width * inputs, outputs)
    gathered = torch.stack(inputs, dim=-1).view(len(x), groups, -1).transpose(0, 1)
    matrices = second.weight.view(groups, channels // groups, -1)
    out = torch.matmul(gathered, matrices.transpose(1, 2)).transpose(0, 1).reshape(x.shape)
    bias = second.bias
    if first.bias is not None:
        every = first.bias.view(groups, 1, each, 1).expand(-1, 1, -1, second.kernel_size[0])
        shift = (matrices * every.reshape(groups, 1, -1)).sum(dim=-1).flatten()
        bias = shift if bias is None else bias + shift
    return out if bias is None else out + bias


def _delayed(handle: StateHandle, kind: str, x: Tensor) -> Tensor:
    """Return, for each token, the row of `x` of the token before it; zeros if there is none."""
    return _advanced(handle, kind, x, lambda: torch.eye(1, 2, device=x.device).expand(len(x[0]), 2))


@takes_cache
def _ngrams(self: ModelPart, input_ids: Tensor, cache: DynamicCache | None) -> Tensor:
    """Return the rows of each token's n-grams, (b, n_tokens, width of all heads).

    Positions before a sequence, and tokens before its latest end of text, count as ends of text.
    States begin with zeros, so a state stores token ids minus the id of the end of text. These
    numbers are exact in fp32.
    """
    handle, end = _handle(cache, self.layer_idx, 2), self.eos_token_id
    ids = input_ids.flatten()
    before = [opaque(NGRAMS, _above_end, ids, end)]
    for shift in range(1, self.ngram_size):
        before.append(_delayed(handle, f"token {shift}", before[-1]))
    sizes, offsets = self.ngram_heads_vocab_sizes, self.ngram_heads_offsets
    settings = end, self.heads_per_ngram, self.layer_multipliers, sizes, offsets
    rows = opaque(NGRAMS, _rows_of_ngrams, *settings, ids, *before[1:])
    found: Tensor = self.ngram_embedding(rows)  # (n_tokens, heads, width)
    return found.view(*input_ids.shape, -1)


def _above_end(ids: Tensor, end: int) -> Tensor:
    return (ids - end).float()[:, None]


def _rows_of_ngrams(
    end: int,
    num_heads: int,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    ids: Tensor,
    *before: Tensor,
) -> Tensor:
    """Return the numbers of the rows that each token reads, (n_tokens, heads of all n-grams).

    For each n from 2 on there are `num_heads`, from a hash of the token and the n - 1 before it.
    """
    mixed, token, hashes = ids * multipliers[0], ids, []
    for number, above in enumerate(before, 1):
        earlier = above.flatten().long() + end
        token = earlier if number == 1 else torch.where(token == end, end, earlier)
        mixed = mixed ^ (token * multipliers[number])
        hashes.append(mixed[:, None].expand(-1, num_heads))
    return torch.cat(hashes, dim=-1) % sizes + offsets


@takes_cache
def _dilated_convolution(
    self: ModelPart, hidden_states: Tensor, cache: DynamicCache | None
) -> Tensor:
    """Convolve each channel with the dilation of `conv1d`, then SiLU: (b, n_tokens, channels)."""

    def operation() -> Convolution:
        weight, step = self.conv1d.weight.squeeze(1), self.conv1d.dilation[0]
        spread = weight.new_zeros(len(weight), (weight.shape[1] - 1) * step + 1)
        spread[:, ::step] = weight
        return Convolution(spread, None, has_silu=True)

    handle = _handle(cache, self.layer_idx, 1)
    out = handle.advance("convolution", operation, hidden_states.flatten(0, 1))
    return out.view(hidden_states.shape)


@takes_cache
def _dynamic_convolution(
    self: ModelPart,
    hidden_states: Tensor,
    dynamic_input: Tensor,
    cache: DynamicCache | None = None,
    conv_mask: object = None,
    cache_offset: int = 0,
    **kwargs: object,
) -> Tensor:
    """Convolve each channel, (b, n_tokens, channels), with the sum of its own and the token's taps.

    All channels of a head share the token's taps. The input is added to the result, and the sum is
    divided by the root of 2 x taps + 1.
    """
    handle = _handle(cache, self.layer_idx + cache_offset, self.conv_idx)
    width, shape = self.conv_kernel_size, (*hidden_states.shape[:2], self.num_heads, 1, -1)
    own = self.static_weight.float().T.view(self.num_heads, -1, width)
    taps = own + self.weight_proj(dynamic_input).float().view(shape)
    before = [hidden_states.float().flatten(0, 1)]
    for lag in range(1, width):
        before.append(_delayed(handle, f"lag {lag}", before[-1]))
    # (b, n_tokens, heads, channels per head, taps)
    windows = torch.stack(before, dim=-1).view(taps.shape)
    mixed: Tensor = (windows * taps).sum(-1).view(hidden_states.shape) + hidden_states.float()
    return (mixed / math.sqrt(2 * width + 1)).to(hidden_states.dtype)


def _advanced(handle: StateHandle, kind: str, x: Tensor, weight: Callable[[], Tensor]) -> Tensor:
    return handle.advance(kind, lambda: Convolution(weight(), None, has_silu=False), x)


LIGHTNING_ATTENTION = Substitution(
    has("qkv_proj", "out_proj", "output_gate", "slope_rate", "act_fn", "norm"),
    _lightning_attention,
)
EMBEDDED_NGRAMS = Substitution(
    has("ngram_embedding", "layer_multipliers", "ngram_heads_vocab_sizes", "heads_per_ngram"),
    _ngrams,
)
DILATED_CONVOLUTION = Substitution(
    has("ple_embedding", "short_conv_state_len", "conv1d"), _dilated_convolution, "_short_conv"
)
DYNAMIC_CONVOLUTION = Substitution(
    has("static_weight", "weight_proj", "conv_idx", "conv_kernel_size"), _dynamic_convolution
)
CONVOLVED_PROJECTION = Substitution(
    has(
        *("q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "num_key_value_groups"),
        *("conv_qk_depthwise", "conv_qk_grouped"),
    ),
    _convolved_projection,
)
