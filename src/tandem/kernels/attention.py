"""Attention over a KV cache on the CPU, for the tokens of a step or of a prompt.

A layer's keys and values are (slots, KV heads, blocks of 16 positions), in the kernels' layout
(`csrc/kv_layout.hpp`); each slot has its own length.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads

# Types of keys and values. The numbers are those of KvType in C++. int8 has one scale per position
# and head.
KV_DTYPES = {"fp32": 0, "bf16": 1, "int8": 2}
_OF_VALUES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64  # kernels read whole chunks, so capacities are multiples


def require_kv_dtype(name: str) -> str:
    """Return a `kv_dtype` in lower case: "auto" or one of `KV_DTYPES`; `ConfigError` for others."""
    if name.lower() not in ("auto", *KV_DTYPES):
        hint = nearest_names(name, ["auto", *KV_DTYPES])
        raise ConfigError(f"kv_dtype is {name!r}, which Tandem does not know; {hint}")
    return name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """The sizes and options of a layer's attention, among them which positions a token sees."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: no cap."""
    window: int = 0
    """Positions that a token sees, including its own; 0: no limit."""
    keeps_prompt: bool = False
    """Whether a token sees its slot's whole prompt besides the window."""
    chunk: int = 0
    """The length of an attention chunk; a token sees only positions in its own. 0: no chunks."""
    selected_block: int = 1
    """The number of positions that an indexer selects together."""
    selects_by_head: bool = False
    """Whether the indexer selects for each KV head separately."""

    @property
    def kept_window(self) -> int:
        """How many of its last positions a slot must keep; 0: all positions."""
        return 0 if self.keeps_prompt else self.window

    def most_seen(self, length: int) -> int:
        """Return how many positions the last of `length` tokens sees, apart from a kept prompt."""
        of_chunk = (length - 1) % self.chunk + 1 if self.chunk else length
        return min(of_chunk, self.window or length)


class DistanceBias(NamedTuple):
    """A bias of attention scores: for each token and head, a weighted sum of profiles.

    A profile has a number for each distance from a token's position back to a key's.
    """

    states: Tensor
    """(heads, n_tokens, dim): the weight of each profile"""
    profiles: Tensor
    """(dim, extent): each profile's numbers for distances 0 to extent - 1; beyond, the bias is 0"""

    def at(self, distances: Tensor) -> Tensor:
        """Return the bias at each token's distances (n_tokens, n): (heads, n_tokens, n) fp32."""
        extent = self.profiles.shape[1]
        by_distance = self.states.float() @ self.profiles.float()  # (heads, n_tokens, extent)
        places = distances.clamp(0, extent - 1).expand(len(by_distance), -1, -1)
        is_near = (distances >= 0) & (distances < extent)
        return by_distance.gather(2, places).masked_fill_(~is_near, 0.0)


class Segment(NamedTuple):
    """Consecutive tokens of one slot within a step."""

    slot: int
    first_position: int
    num_tokens: int


class CachedAttention:
    """Computes one layer's attention on the CPU, and holds the layer's keys and values."""

    def __init__(
        self,
        form: AttentionForm,
        kv_dtype: str | torch.dtype,
        sinks: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
        profiles: Tensor | None = None,
        *,
        is_joint: bool = False,
    ) -> None:
        """Prepare to store keys and values as `kv_dtype`; only `reserve` allocates their memory.

        `kv_dtype` is a key of `KV_DTYPES`, or fp32 or bf16 as a torch dtype. `sinks` (heads,) are
        scores that get a share of the softmax but have no values. If windows keep prompts,
        `prompt_lengths` (slots,) int64 is read each time attention is computed. `profiles` are
        those of a `DistanceBias`. If `is_joint`, the layer's keys are also its values and are
        stored once.
        """
        self.form, self._is_joint = form, is_joint
        self.kv_dtype = kv_dtype if isinstance(kv_dtype, str) else _OF_VALUES[kv_dtype]
        self._sinks = None if sinks is None else sinks.detach().float().contiguous()
        self.native = _native.AttentionLayer(
            KV_DTYPES[self.kv_dtype],
            form.num_heads,
            form.num_kv_heads,
            form.key_dim,
            form.value_dim,
            form.scale,
            form.softcap,
            form.window,
            self._sinks,
            is_joint,
        )
        if form.chunk:
            self.native.set_chunk(form.chunk)
        self.native.set_selection(form.selected_block, form.selects_by_head)
        self._prompt_lengths = prompt_lengths if form.keeps_prompt else None
        if self._prompt_lengths is not None:
            self.native.set_always_seen(self._prompt_lengths)
        # Farthest distance first, so that the biases of a chunk's positions are contiguous.
        self._profiles = None if profiles is None else _with_margins(profiles.float().flip(1))
        if self._profiles is not None:
            self.native.set_bias(self._profiles)
        self.keys, self.values = (
            torch.empty((0, 0, 0, 0), dtype=torch.uint8, device="cpu") for _ in range(2)
        )
        """(slots, KV heads, blocks, bytes of a block)"""
        self.has_token_sinks = False
        """Whether each token has its own sinks."""
        self.compressed: CompressedKeys | None = None
        """Compressed keys that tokens see besides the layer's other keys; None: no such keys."""

    @property
    def has_bias(self) -> bool:
        """Whether scores get a `DistanceBias`, whose states `attend` must receive."""
        return self._profiles is not None

    def compress(self, ratio: int) -> "CompressedKeys":
        """Give the layer compressed keys, one for every `ratio` tokens, and return their store.

        From then on, tokens see these keys besides the layer's other keys.
        """
        self.compressed = CompressedKeys(self.native, self.kv_dtype, ratio)
        return self.compressed

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of keys and values of `num_tokens` tokens in a slot: whole blocks."""
        block_bytes = self.native.key_block_bytes + self.native.value_block_bytes
        return -(-num_tokens // BLOCK_TOKENS) * block_bytes * self.form.num_kv_heads

    def reserve(self, num_slots: int, capacity: int, used: int = 0) -> None:
        """Make room for `num_slots` slots of `capacity` tokens; keep each slot's first `used`.

        Raises `RuntimeError` if memory is exhausted.
        """
        num_blocks = -(-capacity // CHUNK_TOKENS) * (CHUNK_TOKENS // BLOCK_TOKENS)
        used_blocks = -(-used // BLOCK_TOKENS)
        lead = (num_slots, self.form.num_kv_heads, num_blocks)
        sizes = (self.native.key_block_bytes, self.native.value_block_bytes)
        old = (self.keys, self.values)
        new = [torch.empty((*lead, size), dtype=torch.uint8, device="cpu") for size in sizes]
        for target, source in zip(new, old, strict=True):
            if used:
                target[:, :, :used_blocks] = source[:, :, :used_blocks]
        self.keys, self.values = new
        self.native.set_cache(self.keys, self.values)

    def with_sinks(self, sinks: Tensor) -> "CachedAttention":
        """Return attention over this object's present keys and values, with other sinks."""
        other = CachedAttention(
            self.form, self.kv_dtype, sinks, self._prompt_lengths, is_joint=self._is_joint
        )
        other.keys, other.values = self.keys, self.values
        other.native.set_cache(self.keys, self.values)
        return other

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy keys and values of the first `length` tokens from slot `source` to slot `target`.

        With a window, the copy lacks the tokens that `source` no longer holds.
        """
        blocks = -(-length // BLOCK_TOKENS)
        for tensor in (self.keys, self.values):
            tensor[target, :, :blocks] = tensor[source, :, :blocks]

    def append(
        self,
        threads: CpuThreads,
        slots: Tensor,
        positions: Tensor,
        key: Tensor,
        value: Tensor,
        compressed: Tensor | None = None,
    ) -> None:
        """Store tokens' keys and values (kv heads, n_tokens, dim) in their slots.

        `slots` and `positions` are (n_tokens,) int64. The caller must have reserved the memory;
        positions outside the cache raise `ValueError`. A slot's positions must be filled in order,
        without a gap; a layer with a window keeps the last positions for which it has room.
        `compressed` (1, n_tokens, dim) has a compressed key for each token; it is stored only for
        tokens that end a window.
        """
        key, value = _dense_last(key), _dense_last(value)
        compressed = None if compressed is None else _dense_last(compressed)
        threads.attention.append(self.native, slots, positions, key, value, compressed)

    def attend(
        self,
        threads: CpuThreads,
        slots: Tensor,
        positions: Tensor,
        query: Tensor,
        selected: Tensor | None = None,
        bias_states: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the results (n_tokens, heads, value dim) of queries (heads, n_tokens, key dim).

        Consecutive tokens of one slot share reads of keys and values. `selected` (n_tokens, most)
        int32, or (n_tokens, kv heads, most) if the form selects by head, says to what each token
        attends: numbers of compressed keys if the layer has them, otherwise of blocks of positions.
        They are in any order; -1 fills the rest. A token whose first number is -1 attends to all.
        `bias_states` are the states of a `DistanceBias`. `sinks` (n_tokens, heads) are the layer's
        sinks for each token. The result is written to `out` if given.
        """
        query = _dense_last(query)
        if out is None:
            shape = (query.shape[1], self.form.num_heads, self.form.value_dim)
            out = torch.empty(shape, dtype=query.dtype, device="cpu")
        states = None if bias_states is None else _dense_last(bias_states)
        threads.attention.attend(self.native, slots, positions, query, selected, out, states, sinks)
        return out


class CompressedKeys:
    """The compressed keys of a layer: each stands for several tokens, and is also its own value."""

    def __init__(self, layer: _native.AttentionLayer, kv_dtype: str, ratio: int) -> None:
        """Prepare to store a key for every `ratio` tokens; only `reserve` allocates memory."""
        self._layer, self._kv_dtype, self.ratio = layer, kv_dtype, ratio
        self.memory = torch.empty((0, 0, layer.joint_key_bytes), dtype=torch.uint8, device="cpu")
        """(slots, keys, bytes of a key), laid out as in `csrc/kv_layout.hpp`"""
        self._layer.set_compressed(self.memory, ratio)

    @property
    def num_bytes(self) -> int:
        """Bytes that the keys take."""
        return self.memory.nbytes

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of a slot's keys for `num_tokens` tokens, rounded up to whole keys."""
        return -(-num_tokens // self.ratio) * self._layer.joint_key_bytes

    def reserve(self, num_slots: int, capacity: int, used: int = 0) -> None:
        """Make room for the keys of `num_slots` slots of `capacity` tokens.

        The keys of each slot's first `used` tokens are kept.

        Raises `RuntimeError` if memory is exhausted.
        """
        shape = (num_slots, -(-capacity // self.ratio), self._layer.joint_key_bytes)
        old, self.memory = self.memory, torch.empty(shape, dtype=torch.uint8, device="cpu")
        if used:
            self.memory[:, : used // self.ratio] = old[:, : used // self.ratio]
        self._layer.set_compressed(self.memory, self.ratio)

    def of_tokens(self, slot: int, first: int, num_tokens: int) -> Tensor:
        """Return a slot's keys (keys, bytes) for the `num_tokens` tokens from `first` on.

        The tokens must be whole windows.
        """
        return self.memory[slot, first // self.ratio : (first + num_tokens) // self.ratio]

    def invent(self, num_tokens: int) -> None:
        """Fill all slots with random keys for `num_tokens` tokens."""
        keys = self.memory[:, : num_tokens // self.ratio]
        if self._kv_dtype == "int8":
            keys.random_(256)
            keys[..., -4:] = torch.tensor([0.001], device="cpu").view(torch.uint8)  # the scale
        else:
            dtype = next(dtype for dtype, name in _OF_VALUES.items() if name == self._kv_dtype)
            keys.view(dtype).normal_(std=0.1)


def _with_margins(profiles: Tensor) -> Tensor:
    return F.pad(profiles.detach(), (CHUNK_TOKENS, CHUNK_TOKENS)).contiguous()


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
