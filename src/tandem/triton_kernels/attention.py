"""Decode attention, split over the keys: tokens of any slots, of any length.

    store_token    appends a token's keys and values
    attend_parts   each program: some heads of a token, a part of the positions that it sees
    join_parts     adds up the parts of a head, by their sums of exponentials

`where` (5,) int64 on the device has a layer's addresses of keys, values and their scales, and its
capacity. So a captured graph stays valid when a KV cache grows. Keys and values are (slots, KV
heads, capacity, dim); in int8, there is an fp32 scale for each line of `dim` values.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

# One number each for all dtypes and layers, which no kernel should be compiled again for.
_STRIDES = ("key_stride", "key_head_stride", "value_stride", "value_head_stride")
_QUERY_STRIDES = ("query_stride", "query_head_stride", "state_stride", "state_head_stride")


@triton.jit
def _pointer(address: tensor, kind: constexpr) -> tensor:
    """Return a pointer to keys or values, marked as aligned; torch aligns memory to 64 bytes."""
    if kind == "int8":
        pointer = address.to(tl.pointer_type(tl.int8))
    elif kind == "bf16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif kind == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _store_line(
    source: tensor,
    address: tensor,
    scale_address: tensor,
    line: tensor,
    dim: constexpr,
    width: constexpr,
    kind: constexpr,
) -> None:
    """Write a line of `dim` values and, in int8, its scale; int8 rounds as on the CPU."""
    place = tl.arange(0, width)
    values = tl.load(source + place, mask=place < dim, other=0.0).to(tl.float32)
    pointer = _pointer(address, kind) + line * dim + place
    if kind == "int8":
        largest = tl.reduce(tl.abs(values), 0, tl.standard._elementwise_max)
        values = tl.floor(values * tl.where(largest > 0, 127.0 / largest, 0.0) + 0.5)
        tl.store(scale_address.to(tl.pointer_type(tl.float32)) + line, largest / 127.0)
    tl.store(pointer, values.to(pointer.dtype.element_ty), mask=place < dim)


@triton.jit(do_not_specialize=_STRIDES)
def store_token(
    where: tensor,
    slots: tensor,
    positions: tensor,
    key: tensor,
    value: tensor,
    key_stride: tensor,
    key_head_stride: tensor,
    value_stride: tensor,
    value_head_stride: tensor,
    num_kv_heads: constexpr,
    key_dim: constexpr,
    key_width: constexpr,
    value_dim: constexpr,
    value_width: constexpr,
    has_values: constexpr,
    kind: constexpr,
) -> None:
    """Append each token to its slot, at its position. A program is (KV head, token).

    Without `has_values` the values are the first dimensions of the keys.
    """
    head, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lines = (tl.load(slots + token) * num_kv_heads + head) * tl.load(where + 4)
    line = lines + tl.load(positions + token)
    source = key + token * key_stride + head * key_head_stride
    _store_line(source, tl.load(where), tl.load(where + 2), line, key_dim, key_width, kind)
    if has_values:
        source = value + token * value_stride + head * value_head_stride
        _store_line(
            source, tl.load(where + 1), tl.load(where + 3), line, value_dim, value_width, kind
        )


@triton.jit
def _queries(lines: tensor, is_line: tensor, key_dim: constexpr, block_dim: constexpr) -> tensor:
    """Return the queries at the pointers `lines`, as a tuple of pieces (lines, block_dim)."""
    found = ()
    for piece in tl.static_range((key_dim + block_dim - 1) // block_dim):
        dim = piece * block_dim + tl.arange(0, block_dim)
        mask = is_line[:, None] & (dim < key_dim)[None, :]
        found = found + (tl.load(lines[:, None] + dim[None, :], mask=mask, other=0.0),)
    return found


@triton.jit
def _scores(
    queries: tensor,
    keys: tensor,
    line: tensor,
    is_seen: tensor,
    key_dim: constexpr,
    block_dim: constexpr,
    block_heads: constexpr,
    block_keys: constexpr,
) -> tensor:
    """Return the products of queries with the lines' keys: (block_heads, block_keys) fp32."""
    total = tl.full((block_heads, block_keys), 0.0, dtype=tl.float32)
    for piece in tl.static_range((key_dim + block_dim - 1) // block_dim):
        dim = piece * block_dim + tl.arange(0, block_dim)
        mask = is_seen[None, :] & (dim < key_dim)[:, None]
        some = tl.load(keys + line[None, :] * key_dim + dim[:, None], mask=mask, other=0)
        query = queries[piece]
        total = tl.dot(query, some.to(query.dtype), total, input_precision="ieee")
    return total


@triton.jit
def _line_scales(
    where: tensor, line: tensor, is_seen: tensor, factor: constexpr, kind: constexpr
) -> tensor:
    """Return `factor` for each line, in int8 times the line's scale; 0 for unseen lines."""
    if kind == "int8":
        pointer = tl.load(where).to(tl.pointer_type(tl.float32)) + line
        scale = tl.load(pointer, mask=is_seen, other=0.0) * factor
    else:
        scale = tl.where(is_seen, factor, 0.0)
    return scale


@triton.jit
def _bounds(
    position: tensor,
    prompt_length: tensor,
    window: constexpr,
    chunk: constexpr,
    num_parts: constexpr,
    block_keys: constexpr,
) -> tensor:
    """Return (begin, end, first, skipped): this program's part of the positions a token sees.

    These positions are numbered without gaps, and the part is the numbers from `begin` to before
    `end`. In the window, which begins at position `first`, a number is the position itself. Prompt
    positions before the window have the numbers just before `first`: position + `skipped`.
    """
    length = (position + 1).to(tl.int32)
    first = tl.maximum(length - window, 0) if window > 0 else 0
    if chunk > 0:
        first = tl.maximum(first, (length - 1) // chunk * chunk)
    skipped = first - tl.minimum(first, prompt_length)
    blocks = (length - skipped + block_keys - 1) // block_keys
    each = (blocks + num_parts - 1) // num_parts * block_keys
    begin = skipped + tl.program_id(1) * each
    return begin, tl.minimum(begin + each, length), first, skipped


@triton.jit
def _bias(
    states: tensor,
    profiles: tensor,
    is_head: tensor,
    distance: tensor,
    bias_dim: constexpr,
    extent: constexpr,
) -> tensor:
    """Return the distance bias of scores: (heads, distances) fp32.

    `states` are pointers to the heads' states; `profiles` are as in `attend_parts`.
    """
    is_near = distance < extent
    total = tl.full((is_head.shape[0], distance.shape[0]), 0.0, dtype=tl.float32)
    for number in tl.static_range(bias_dim):
        state = tl.load(states + number, mask=is_head, other=0.0).to(tl.float32)
        profile = tl.load(profiles + number * extent + distance, mask=is_near, other=0.0)
        total += state[:, None] * profile.to(tl.float32)[None, :]
    return total


@triton.jit
def _weights(scores: tensor, is_seen: tensor, largest: tensor, softcap: constexpr) -> tensor:
    """Return exponentials of scores, a factor for earlier results, and the new largest scores.

    Scores are (rows, keys), `largest` has each row's largest score so far; the exponentials are
    relative to the new one. `is_seen` is broadcast to the scores. With a softcap, scores become
    softcap * tanh(score / softcap).
    """
    if softcap > 0:
        scores = softcap * (1 - 2 / (tl.exp(scores * (2 / softcap)) + 1))
    scores = tl.where(is_seen, scores, float("-inf"))
    now = tl.maximum(largest, tl.reduce(scores, 1, tl.standard._elementwise_max))
    # A row that has seen nothing so far has no largest score to subtract.
    base = tl.where(now == float("-inf"), 0.0, now)
    return tl.exp(scores - base[:, None]), tl.exp(largest - base), now


@triton.jit(do_not_specialize=_QUERY_STRIDES)
def attend_parts(
    where: tensor, slots: tensor, positions: tensor, query: tensor, parts: tensor, sums: tensor,
    prompt_lengths: tensor, states: tensor, profiles: tensor, query_stride: tensor,
    query_head_stride: tensor, state_stride: tensor, state_head_stride: tensor,
    num_heads: constexpr, num_kv_heads: constexpr, key_dim: constexpr, value_dim: constexpr,
    value_width: constexpr,
    line_dim: constexpr, kind: constexpr, scale: constexpr, softcap: constexpr, window: constexpr,
    chunk: constexpr, num_parts: constexpr, block_heads: constexpr, block_keys: constexpr,
    block_dim: constexpr, bias_dim: constexpr, extent: constexpr,
) -> None:  # fmt: skip
    """Attend to a part of the positions. A program is (some heads of a KV head, part, token).

    If `value_width` is less than `value_dim`, a program computes `value_width` of the values'
    dimensions, and the programs of one group of heads are neighbours. Writes parts (tokens, heads,
    num_parts, value_dim), and in sums (tokens, heads, num_parts, 2) the largest score and the sum
    of exponentials relative to it. `line_dim` is the distance between lines of values. With
    `prompt_lengths` (n_tokens,), each token also sees all positions before its prompt length. With
    `states` (heads, n_tokens, bias_dim), a weighted sum of `profiles` (bias_dim, extent) at each
    key's distance is added to the scores.
    """
    group: constexpr = num_heads // num_kv_heads
    tiles: constexpr = (group + block_heads - 1) // block_heads
    blocks: constexpr = (value_dim + value_width - 1) // value_width
    tile = tl.program_id(0) // blocks
    token, kv_head = tl.program_id(2).to(tl.int64), tile // tiles
    in_group = tile % tiles * block_heads + tl.arange(0, block_heads)
    head, is_head = kv_head * group + in_group, in_group < group
    position, prompt = tl.load(positions + token), 0
    if prompt_lengths is not None:
        prompt = tl.load(prompt_lengths + token).to(tl.int32)
    begin, end, first, skipped = _bounds(position, prompt, window, chunk, num_parts, block_keys)
    base = (tl.load(slots + token) * num_kv_heads + kv_head) * tl.load(where + 4)
    keys, values = _pointer(tl.load(where), kind), _pointer(tl.load(where + 1), kind)
    lines = query + token * query_stride + head * query_head_stride
    queries = _queries(lines, is_head, key_dim, block_dim)
    largest = tl.full((block_heads,), float("-inf"), dtype=tl.float32)
    total = tl.full((block_heads,), 0.0, dtype=tl.float32)
    out = tl.full((block_heads, value_width), 0.0, dtype=tl.float32)
    dim = tl.program_id(0) % blocks * value_width + tl.arange(0, value_width)
    for start in range(begin, end, block_keys):
        place = start + tl.arange(0, block_keys)
        is_seen = place < end
        if prompt_lengths is not None:
            place = tl.where(place < first, place - skipped, place)
        line = base + place
        scores = _scores(queries, keys, line, is_seen, key_dim, block_dim, block_heads, block_keys)
        scores *= _line_scales(where + 2, line, is_seen, scale, kind)[None, :]
        if bias_dim > 0:
            of_heads = states + token * state_stride + head * state_head_stride
            distance = tl.maximum(position - place, 0)
            scores += _bias(of_heads, profiles, is_head, distance, bias_dim, extent)
        weights, fade, largest = _weights(scores, is_seen[None, :], largest, softcap)
        total = total * fade + tl.reduce(weights, 1, tl.standard._sum_combine)
        weights *= _line_scales(where + 3, line, is_seen, 1.0, kind)[None, :]
        mask = is_seen[:, None] & (dim < value_dim)[None, :]
        some = tl.load(values + line[:, None] * line_dim + dim[None, :], mask=mask, other=0)
        some = some.to(query.dtype.element_ty)
        out = tl.dot(weights.to(some.dtype), some, out * fade[:, None], input_precision="ieee")
    at = (token * num_heads + head) * num_parts + tl.program_id(1)
    tl.store(sums + 2 * at, largest, mask=is_head)
    tl.store(sums + 2 * at + 1, total, mask=is_head)
    mask = is_head[:, None] & (dim < value_dim)[None, :]
    tl.store(parts + at[:, None] * value_dim + dim[None, :], out, mask=mask)


@triton.jit
def join_parts(
    parts: tensor,
    sums: tensor,
    sinks: tensor,
    out: tensor,
    num_heads: constexpr,
    value_dim: constexpr,
    num_parts: constexpr,
    has_sinks: constexpr,
    block_cols: constexpr,
    sink_stride: constexpr,
) -> None:
    """Write the joined parts: out (n_tokens, heads, value_dim).

    A program is (columns, head, token). `sinks` (heads,), or (n_tokens, heads) with `sink_stride`,
    take a share of the softmax but have no values.
    """
    head, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    line, part = token * num_heads + head, tl.arange(0, num_parts)
    at = line * num_parts + part
    largest, total = tl.load(sums + 2 * at), tl.load(sums + 2 * at + 1)
    top = tl.reduce(largest, 0, tl.standard._elementwise_max)
    if has_sinks:
        sink = tl.load(sinks + token * sink_stride + head).to(tl.float32)
        top = tl.maximum(top, sink)
    share = tl.exp(largest - top)
    whole = tl.reduce(share * total, 0, tl.standard._sum_combine)
    if has_sinks:
        whole += tl.exp(sink - top)
    col = tl.program_id(0) * block_cols + tl.arange(0, block_cols)
    values = tl.load(
        parts + at[:, None] * value_dim + col[None, :],
        mask=(col < value_dim)[None, :] & (total > 0)[:, None],
        other=0.0,
    )
    result = tl.reduce(values * share[:, None], 0, tl.standard._sum_combine) / whole
    tl.store(out + line * value_dim + col, result.to(out.dtype.element_ty), mask=col < value_dim)
