"""Decode attention on a GPU: launches the kernels of `attention` and `windows`, and never waits.

A step's launches depend on its shapes alone, not on the lengths of texts or the addresses of keys.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.kernels.attention import AttentionForm, DistanceBias
from tandem.triton_kernels import attention, prompt_attention, windows
from tandem.triton_kernels.selected_keys import select_keys, select_prompt_keys

_BLOCK_HEADS = 16  # the fewest rows of a matrix unit
_MOST_PARTS = 64
# Programs of a launch for each of the GPU's processors, where one sequence has too few heads.
_PROGRAMS_EACH = 2
_JOINED_COLS = 64
_PROMPT_ROWS, _PROMPT_WARPS = 64, 8  # of a program that has several tokens
# Each part of a prompt's keys is written once more, and read.
_MOST_PROMPT_PARTS = 4
# Elements of fp32 that a program holds of its result and of a block's values.
_MOST_ELEMENTS = 128 * 64
_SMALL_WIDTH = 256  # dimensions of values in small tiles
_WINDOW_WARPS = 8
_AS_THEY_ARE = {"bf16": torch.bfloat16, "fp16": torch.float16}


@torch.library.custom_op("tandem::decode_attention", mutates_args=())
def _append_and_attend(
    where: Tensor,
    slots: Tensor,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    kind: str,
    value_dim: int,
    scale: float,
    softcap: float,
    window: int,
    num_processors: int,
    has_small_tiles: bool,
    prompt_lengths: Tensor | None = None,
    states: Tensor | None = None,
    profiles: Tensor | None = None,
    chunk: int = 0,
    is_prompt: bool = False,
) -> Tensor:
    """Compute `DecodeAttention.__call__` as one torch operation; writes to addresses in `where`."""
    form = AttentionForm(
        num_heads=query.shape[0], num_kv_heads=key.shape[0], key_dim=key.shape[2],
        value_dim=value_dim, scale=scale, softcap=softcap, window=window,
        keeps_prompt=prompt_lengths is not None, chunk=chunk,
    )  # fmt: skip
    bias = None if states is None or profiles is None else DistanceBias(states, profiles)
    kernels = DecodeAttention(num_processors, has_small_tiles=has_small_tiles)
    kernels.store(where, slots, positions, key, value, kind)
    has_values = value.shape[2] > 0
    return kernels.attend(
        form, where, slots, positions, query, sinks, kind, has_values=has_values,
        prompt_lengths=prompt_lengths, bias=bias, is_prompt=is_prompt,
    )  # fmt: skip


@torch.library.custom_op("tandem::window_attention", mutates_args=())
def _append_and_attend_in_windows(
    where: Tensor,
    slots: Tensor,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    compressed: Tensor | None,
    chosen: Tensor | None,
    sinks: Tensor | None,
    kind: str,
    ring: int,
    ratio: int,
    scale: float,
    window: int,
    num_processors: int,
    has_small_tiles: bool,
) -> Tensor:
    """Compute `in_windows` as one torch operation; writes to addresses in `where`."""
    num_heads, num_tokens, dim = query.shape
    query, key = _dense_lines(query), _dense_lines(key)
    new = key if compressed is None else _dense_lines(compressed)
    seen = positions if chosen is None else chosen.contiguous()
    width = _width(dim)
    layer = {"ring": ring, "ratio": ratio, "dim": dim, "width": width, "kind": kind}
    windows.store_in_window[num_tokens,](
        where, slots, positions, key, new, key.stride(1), new.stride(1), **layer
    )
    blocks = _window_blocks(kind, query.dtype, has_small_tiles=has_small_tiles)
    tiles = -(-num_heads // blocks["block_heads"])
    most = _MOST_PARTS if ratio else -(-window // blocks["block_keys"])
    num_parts = _num_parts(num_processors, tiles * num_tokens, most)
    parts, sums = _new_parts(query, num_parts, dim)
    windows.attend_window_parts[tiles, num_parts, num_tokens](
        where, slots, positions, seen, query, parts, sums, query.stride(1), query.stride(0),
        0 if chosen is None else seen.shape[1], **layer, num_heads=num_heads, scale=scale,
        window=window, has_chosen=chosen is not None, num_parts=num_parts,
        num_warps=_WINDOW_WARPS, **blocks,
    )  # fmt: skip
    return _joined(parts, sums, sinks, query)


class DecodeAttention:
    """Attends by splitting the keys among enough programs to keep a GPU busy.

    Each layer's attention is one torch operation, so that recordings and captures see it.
    """

    def __init__(self, num_processors: int, *, has_small_tiles: bool = False) -> None:
        """Prepare for a GPU with `num_processors` multiprocessors.

        Small tiles fit in 64 KiB of shared memory, other tiles in 99 KiB.
        """
        self._num_processors, self._has_small_tiles = num_processors, has_small_tiles

    def __call__(
        self,
        form: AttentionForm,
        where: Tensor,
        slots: Tensor,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        kind: str,
        prompt_lengths: Tensor | None = None,
        bias: DistanceBias | None = None,
        is_prompt: bool = False,
    ) -> Tensor:
        """Append tokens to their slots, and return results; see `store` and `attend`."""
        result: Tensor = _append_and_attend(
            where, slots, positions, query, key, value, sinks, kind, form.value_dim, form.scale,
            form.softcap, form.window, self._num_processors, self._has_small_tiles,
            prompt_lengths if form.keeps_prompt else None, *(bias or (None, None)), form.chunk,
            is_prompt,
        )  # fmt: skip
        return result

    def in_windows(
        self,
        form: AttentionForm,
        where: Tensor,
        slots: Tensor,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        compressed: Tensor | None,
        chosen: Tensor | None,
        sinks: Tensor | None,
        kind: str,
        ring: int,
        ratio: int,
    ) -> Tensor:
        """Append tokens to their slots' rings, and return results in the form of `attend`.

        See `triton_kernels.windows`. Tensors are those of `store` and `attend`, but keys are
        also values. `compressed` (1, n_tokens, dim) has a compressed key for each token that ends a
        window of `ratio` tokens. `chosen` (n_tokens, most) has the numbers of the compressed keys
        that each token sees beside its window, padded with -1; None: each token sees all compressed
        keys before it.
        """
        result: Tensor = _append_and_attend_in_windows(
            where, slots, positions, query, key, compressed, chosen, sinks, kind, ring, ratio,
            form.scale, form.window, self._num_processors, self._has_small_tiles,
        )  # fmt: skip
        return result

    def select_keys(
        self,
        keys: Tensor,
        slots: Tensor,
        positions: Tensor,
        key: Tensor,
        query: Tensor,
        weights: Tensor,
        *,
        block: int,
        scale: float,
        most: int,
        length: int,
    ) -> Tensor:
        """Store tokens' index keys; return the numbers (n_tokens, most) of each token's best keys.

        See `triton_kernels.index_keys`.
        """
        result: Tensor = select_keys(
            keys, slots, positions, key, query, weights, block, scale, most, length
        )
        return result

    def select_keys_of_prompt(
        self,
        keys: Tensor,
        positions: Tensor,
        query: Tensor,
        weights: Tensor,
        *,
        block: int,
        scale: float,
        most: int,
        first: int,
    ) -> Tensor:
        """Return a mask (n_tokens, keys), true for the best keys, at most `most`, of each token.

        See `triton_kernels.index_keys`.
        """
        return select_prompt_keys(keys, positions, query, weights, block, scale, most, first)

    def store(
        self, where: Tensor, slots: Tensor, positions: Tensor, key: Tensor, value: Tensor, kind: str
    ) -> None:
        """Append tokens to their slots; key and value are (KV heads, n_tokens, dim).

        `where` is as in `triton_kernels.attention`, `slots` and `positions` are (n_tokens,) int64.
        If the dim of `value` is 0, only keys are stored, which contain the values.
        """
        num_heads, num_tokens, key_dim = key.shape
        key, value = _dense_lines(key), _dense_lines(value)
        value_dim = value.shape[2]
        attention.store_token[num_heads, num_tokens](
            where, slots, positions, key, value, key.stride(1), key.stride(0), value.stride(1),
            value.stride(0), num_kv_heads=num_heads, key_dim=key_dim, key_width=_width(key_dim),
            value_dim=value_dim, value_width=_width(value_dim), has_values=value_dim > 0, kind=kind,
        )  # fmt: skip

    def attend(
        self,
        form: AttentionForm,
        where: Tensor,
        slots: Tensor,
        positions: Tensor,
        query: Tensor,
        sinks: Tensor | None,
        kind: str,
        *,
        has_values: bool = True,
        prompt_lengths: Tensor | None = None,
        bias: DistanceBias | None = None,
        is_prompt: bool = False,
    ) -> Tensor:
        """Return results (n_tokens, heads, value_dim) for queries (heads, n_tokens, key_dim).

        Each token sees its slot's positions up to and including its own. Without `has_values`, the
        values are the first dimensions of the keys. With `prompt_lengths` (n_tokens,), a token sees
        all of its slot's prompt besides its window. `sinks` are (heads,) or (n_tokens, heads). With
        `is_prompt`, all tokens must be of one slot, and a program reads its keys for several of
        these tokens.
        """
        num_heads, num_tokens, _ = query.shape
        query, group = _dense_lines(query), num_heads // form.num_kv_heads
        blocks = _blocks(form, query.dtype, has_small_tiles=self._has_small_tiles)
        columns = -(-form.value_dim // blocks["value_width"])
        if is_prompt and prompt_lengths is None and bias is None:
            most = _BLOCK_HEADS if self._has_small_tiles else _PROMPT_ROWS
            heads, tokens = _rows_of_prompt(group, blocks["value_width"], most)
            tiles = columns * form.num_kv_heads * -(-group // heads)
            token_tiles = -(-num_tokens // tokens)
            num_parts = _num_parts(self._num_processors, tiles * token_tiles, _MOST_PROMPT_PARTS)
            parts, sums = _new_parts(query, num_parts, form.value_dim)
            prompt_attention.attend_tokens[tiles, num_parts, token_tiles](
                where, slots, positions, query, parts, sums, query.stride(1), query.stride(0),
                num_tokens, **_sizes(form, kind, has_values=has_values), num_parts=num_parts,
                block_heads=heads, block_tokens=tokens, **{**blocks, "num_warps": _PROMPT_WARPS},
            )  # fmt: skip
            return _joined(parts, sums, sinks, query)
        tiles = columns * form.num_kv_heads * -(-group // _BLOCK_HEADS)
        num_parts = _num_parts(self._num_processors, tiles * num_tokens)
        parts, sums = _new_parts(query, num_parts, form.value_dim)
        added, strides, (bias_dim, extent) = _of_bias(bias)
        attention.attend_parts[tiles, num_parts, num_tokens](
            where, slots, positions, query, parts, sums, prompt_lengths, *added, query.stride(1),
            query.stride(0), *strides,
            **_sizes(form, kind, has_values=has_values), num_parts=num_parts,
            block_heads=_BLOCK_HEADS, **blocks, bias_dim=bias_dim, extent=extent,
        )  # fmt: skip
        return _joined(parts, sums, sinks, query)


def _sizes(form: AttentionForm, kind: str, *, has_values: bool) -> dict[str, Any]:
    """Return a kernel's compile-time constants for a form, and for the `kind` of stored numbers."""
    return {
        "num_heads": form.num_heads, "num_kv_heads": form.num_kv_heads, "key_dim": form.key_dim,
        "value_dim": form.value_dim, "line_dim": form.value_dim if has_values else form.key_dim,
        "kind": kind, "scale": form.scale, "softcap": form.softcap, "window": form.window,
        "chunk": form.chunk,
    }  # fmt: skip


def _rows_of_prompt(group: int, value_width: int, most: int) -> tuple[int, int]:
    """Return the numbers of heads and of tokens of a program, powers of two: a row for each pair.

    `group` is the number of heads that share a key; there are at most `most` rows.
    """
    rows = max(_BLOCK_HEADS, min(most, _MOST_ELEMENTS // value_width))
    heads = min(rows, 1 << (group - 1).bit_length())
    return heads, rows // heads


def _num_parts(num_processors: int, num_programs: int, most: int = _MOST_PARTS) -> int:
    """Return how many parts to split keys into, so that programs occupy all multiprocessors.

    The result is rounded up to a power of two; before that it is at most `most`.
    """
    target = -(-_PROGRAMS_EACH * num_processors // num_programs)
    return 1 << (max(1, min(most, target)) - 1).bit_length()


def _new_parts(query: Tensor, num_parts: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return empty `parts` and `sums` of `attend_parts` for queries (heads, n_tokens, dim)."""
    lines = (query.shape[1], query.shape[0], num_parts)
    parts = query.new_empty((*lines, value_dim), dtype=torch.float32)
    return parts, query.new_empty((*lines, 2), dtype=torch.float32)


def _joined(parts: Tensor, sums: Tensor, sinks: Tensor | None, query: Tensor) -> Tensor:
    """Return the joined parts: (n_tokens, heads, value_dim), in the queries' dtype."""
    num_tokens, num_heads, num_parts, value_dim = parts.shape
    out = query.new_empty(num_tokens, num_heads, value_dim)
    attention.join_parts[-(-value_dim // _JOINED_COLS), num_heads, num_tokens](
        parts, sums, parts if sinks is None else sinks.contiguous(), out,
        num_heads=num_heads, value_dim=value_dim, num_parts=num_parts,
        has_sinks=sinks is not None, block_cols=_JOINED_COLS,
        sink_stride=num_heads if sinks is not None and sinks.dim() == 2 else 0,
    )  # fmt: skip
    return out


_OfBias = tuple[tuple[Tensor | None, Tensor | None], tuple[int, int], tuple[int, int]]


def _of_bias(bias: DistanceBias | None) -> _OfBias:
    """Return the kernel's arguments for a distance bias: states, profiles, strides, sizes."""
    if bias is None:
        return (None, None), (0, 0), (0, 0)
    states, profiles = _dense_lines(bias.states), bias.profiles.contiguous()
    sizes = profiles.shape[0], profiles.shape[1]
    return (states, profiles), (states.stride(1), states.stride(0)), sizes


def _blocks(form: AttentionForm, dtype: torch.dtype, *, has_small_tiles: bool) -> dict[str, int]:
    """Return the sizes of a program's blocks, which fit in 99 KiB of shared memory.

    Small tiles fit in 64 KiB and do not spill registers: a program has half as many elements, and
    at most `_SMALL_WIDTH` of the values' dimensions.
    """
    piece = form.key_dim & -form.key_dim  # the largest power of two in it
    width = _width(form.value_dim)
    width = min(width, _SMALL_WIDTH) if has_small_tiles else width
    most = _MOST_ELEMENTS // (2 if has_small_tiles else 1)
    keys = max(16, min(64, most // width) // (2 if dtype == torch.float32 else 1))
    return {
        "value_width": width,
        "block_keys": keys,
        "block_dim": max(16, min(128, piece)),
        "num_warps": 8 if width > (64 if has_small_tiles else 128) else 4,
        "num_stages": 2,
    }


def _window_blocks(kind: str, dtype: torch.dtype, *, has_small_tiles: bool) -> dict[str, int]:
    """Return the sizes of a program's blocks, like `_blocks`, for keys of up to 512 dimensions.

    With fp32 queries or small tiles, products do not use matrix units, and operands are fp32. The
    keys of the next block are prefetched only if keys need no conversion, because a conversion
    leaves too few registers.
    """
    if has_small_tiles or dtype == torch.float32:
        heads = _BLOCK_HEADS // (2 if has_small_tiles else 1)
        return {"block_heads": heads, "block_keys": 16, "num_stages": 1}
    num_stages = 2 if _AS_THEY_ARE.get(kind) == dtype else 1
    return {"block_heads": _BLOCK_HEADS, "block_keys": 32, "num_stages": num_stages}


def _width(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length()) if dim else 16


def _dense_lines(tensor: Tensor) -> Tensor:
    """Return a tensor (heads, n_tokens, dim), copied unless its lines are contiguous."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
