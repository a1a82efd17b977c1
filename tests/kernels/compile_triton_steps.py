"""Compiles what a decode step launches beside its experts, for GPUs that are not here.

    python -m tests.kernels.compile_triton_steps 80 90    # capabilities
    python -m tests.kernels.compile_triton_steps --code 89    # of hand-overs

Prints JSON like `compile_triton`; the GPUs take the cases in turn.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandem.devices.cuda import handing
from tandem.experts.execution.look_ahead_routers import SCORINGS, LookAheadRouter
from tandem.kernels.attention import AttentionForm, DistanceBias
from tandem.kernels.dense import DenseWeight
from tandem.kernels.device_compression import ring_shape
from tandem.kernels.device_states import Run, SlotTokens, StateMemory, logged_values
from tandem.kernels.formats.packed import PackedMatrix
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.hyper_connections import HyperConnection
from tandem.kernels.recurrent import (
    MOST_DRAFTED,
    Compression,
    Convolution,
    Recurrence,
    RecurrenceForm,
    StateOperation,
)
from tandem.triton_kernels import (
    attention,
    chains,
    compression,
    dense,
    hand_over,
    hyper_connections,
    index_keys,
    operations,
    prompt_attention,
    recurrent,
    small,
    sorting,
    windows,
)
from tandem.triton_kernels.decode_attention import DecodeAttention
from tandem.triton_kernels.states import TritonStates
from tests.kernels.compile_triton import (
    Launch,
    compiled,
    noted_launches,
    noted_launches_of,
    result_of,
)

KERNELS = (
    (attention, ("store_token", "attend_parts", "join_parts")),
    (prompt_attention, ("attend_tokens",)),
    (sorting, ("look_up", "count_rows", "sort_rows")),
    (windows, ("store_in_window", "attend_window_parts")),
    (
        index_keys,
        ("store_index_keys", "score_index_keys", "score_prompt_keys", "select_index_keys"),
    ),
    (small, ("norm_rows", "add_and_norm_rows", "rotate_heads", "rotate_pairs", "choose_experts")),
    (hand_over, ("publish", "ask", "publish_guess", "take_fetched", "combine")),
    (recurrent, ("convolve_tokens", "recur_tokens")),
    (compression, ("compress_tokens",)),
    (hyper_connections, ("multiply_streams", "weigh_streams", "add_streams")),
    (chains, ("run_chain",)),
)
# Heads, KV heads, key and value dimensions, what lies in memory, dtype, window, sinks, the extent
# of a bias by distance: as models have them; of latents the values are a part of the keys.
CASES = (
    (32, 4, 128, 128, "bf16", torch.bfloat16, 0, False),
    (64, 8, 64, 64, "int8", torch.bfloat16, 128, True),
    (16, 2, 256, 256, "int8", torch.bfloat16, 0, False),
    (16, 2, 512, 512, "bf16", torch.bfloat16, 0, False),
    (128, 1, 576, 512, "bf16", torch.bfloat16, 0, False),
    (16, 16, 192, 128, "fp32", torch.float32, 0, False),
    (20, 20, 256, 256, "bf16", torch.bfloat16, 0, False),
    (32, 8, 64, 64, "fp16", torch.float16, 1024, False),
    (16, 2, 256, 256, "fp32", torch.float32, 0, True),
    (128, 1, 576, 512, "int8", torch.bfloat16, 0, False),
    (64, 8, 128, 128, "bf16", torch.bfloat16, 0, True, 1024),
    (64, 16, 128, 128, "int8", torch.bfloat16, 512, False, 512),
)


# What lies in memory, dtype, tokens of a compressed key, how many keys are chosen: DeepSeek-V4's.
WINDOWS = (
    ("bf16", torch.bfloat16, 4, 512),
    ("fp32", torch.float32, 0, 0),
    ("int8", torch.float32, 128, 0),
    ("int8", torch.bfloat16, 4, 512),
)


def launches_of(work: Callable[..., None], *args: Any) -> list[Launch]:
    """Return the kernels' launches while a function runs."""
    launches = noted_launches_of(KERNELS)
    work(*args)
    return launches


def attend(case: tuple[Any, ...], capability: int) -> None:
    """Launch the attention of a decode step with two slots."""
    heads, kv_heads, key_dim, value_dim, kind, dtype, window, has_sinks, *extents = case
    form = AttentionForm(
        num_heads=heads, num_kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim,
        scale=0.1, window=window, keeps_prompt=bool(window and extents),
    )  # fmt: skip
    is_latent = kv_heads == 1
    where, places = torch.zeros(5, dtype=torch.int64), (torch.zeros(2, dtype=torch.int64),) * 2
    query = torch.zeros(2, heads, key_dim, dtype=dtype).transpose(0, 1)
    key, value = (
        torch.zeros(2, kv_heads, dim, dtype=dtype).transpose(0, 1)
        for dim in (key_dim, 0 if is_latent else value_dim)
    )
    sinks = torch.zeros(heads, dtype=dtype) if has_sinks else None
    kernels = DecodeAttention(128, has_small_tiles=capability < 80)
    kernels.store(where, *places, key, value, kind)
    bias = None
    for extent in extents:
        profiles = torch.zeros(16, extent, dtype=dtype)
        bias = DistanceBias(torch.zeros(heads, 2, 16, dtype=dtype), profiles)
        sinks = None if sinks is None else torch.zeros(2, heads, dtype=dtype)
    kernels.attend(
        form, where, *places, query, sinks, kind, has_values=not is_latent,
        prompt_lengths=places[0] if form.keeps_prompt else None, bias=bias,
    )  # fmt: skip
    if bias is None:
        kernels.attend(
            form, where, *places, query, sinks, kind, has_values=not is_latent, is_prompt=True
        )


def attend_in_windows(case: tuple[Any, ...], capability: int) -> None:
    """Launch the attention of a decode step with two slots, windows and compressed keys."""
    kind, dtype, ratio, most = case
    form = AttentionForm(
        num_heads=64, num_kv_heads=1, key_dim=512, value_dim=512, scale=0.1, window=128
    )
    where, places = torch.zeros(5, dtype=torch.int64), (torch.zeros(2, dtype=torch.int64),) * 2
    query, key = (torch.zeros(2, n, 512, dtype=dtype).transpose(0, 1) for n in (64, 1))
    chosen = torch.zeros(2, most, dtype=torch.int64) if most else None
    kernels = DecodeAttention(128, has_small_tiles=capability < 80)
    kernels.in_windows(
        form, where, *places, query, key, key if ratio else None, chosen, torch.zeros(64), kind,
        1024, ratio,
    )  # fmt: skip


def select(dtype: torch.dtype) -> None:
    """Launch a decode step of DeepSeek-V4's indexer with two slots."""
    keys, places = torch.zeros(2, 1025, 128), (torch.zeros(2, dtype=torch.int64),) * 2
    key, query = torch.zeros(2, 128, dtype=dtype), torch.zeros(2, 64, 128, dtype=dtype)
    DecodeAttention(128).select_keys(
        keys, *places, key, query, torch.zeros(2, 64), block=4, scale=0.1, most=512, length=4096
    )
    DecodeAttention(128).select_keys_of_prompt(
        keys[0], places[0], query, torch.zeros(2, 64, dtype=dtype), block=4, scale=0.1, most=512,
        first=0,
    )  # fmt: skip


def do_small(hidden_size: int, head_dim: int, num_experts: int, top_k: int) -> None:
    """Launch the small operations of a layer for two tokens."""
    hidden = torch.zeros(2, 1, hidden_size, dtype=torch.bfloat16)
    heads, fewer = (torch.zeros(2, n, 1, head_dim, dtype=torch.bfloat16) for n in (8, 2))
    table = torch.zeros(2, 1, head_dim, dtype=torch.bfloat16)
    logits = torch.zeros(2, num_experts, dtype=torch.bfloat16)
    operations.norm(hidden, torch.ones(hidden_size), 1e-6, True)
    operations.norm(heads.transpose(1, 2), torch.ones(head_dim), 1e-6, True)
    operations.add_and_norm(hidden, hidden, torch.ones(hidden_size), 1e-6, False)
    operations.rotate(heads, table, table, 1)
    operations.rotate_two(heads, fewer, table, table, 1)
    operations.rotate_pairs(heads, *[table[..., : head_dim // 4]] * 2, 1)
    operations.choose(logits, top_k, 1.0, True, torch.float32)
    sorting.each_alone(torch.zeros(2, top_k).long(), torch.zeros(num_experts).long())
    sorting.sorted_by_expert(torch.zeros(32, top_k).long(), torch.zeros(num_experts).long())


# As Qwen3.6, Kimi-Linear, Nemotron-H, Jamba and MiniMax have them; the widest keys there are.
STATES = (
    RecurrenceForm(32, 16, 128, 128, "head", is_delta=True, is_normalised=True, scale=0.1),
    RecurrenceForm(32, 32, 128, 128, "key", is_delta=True, is_normalised=True, scale=0.1),
    RecurrenceForm(64, 8, 128, 64, "head"),
    RecurrenceForm(1, 1, 16, 8192, "pair"),
    RecurrenceForm(64, 64, 96, 96, "head"),
    RecurrenceForm(8, 8, 512, 512, "key", is_delta=True),
)


def advance(form: RecurrenceForm) -> None:
    """Launch a recurrence and a convolution for two slots."""
    kernels = TritonStates()
    tokens = SlotTokens(torch.tensor([Run(0, 0, 1, 1)] * 2), 1)
    is_pair = form.decay == "pair"
    dtype = torch.float32 if is_pair else torch.bfloat16
    value = torch.zeros(2, form.num_heads, form.value_dim, dtype=dtype)
    query = torch.zeros(2, form.num_key_heads, form.key_dim, dtype=dtype)
    factor = torch.zeros(form.value_dim, form.key_dim) if is_pair else None
    skip = None if is_pair or form.is_delta else torch.zeros(form.num_heads, form.value_dim)
    states = torch.zeros(2, form.num_heads, form.key_dim, form.value_dim)
    decay, rate = torch.zeros(2, form.value_dim), value[:, :, 0]
    operation = Recurrence(form, factor, skip)
    kernels.recur(
        operation, memory_of(operation, states), tokens, value, query, query, decay,
        *([] if is_pair else [rate]),
    )  # fmt: skip
    x = torch.zeros(2, 8192, dtype=torch.bfloat16)
    convolution = Convolution(torch.zeros(8192, 4), None, has_silu=True)
    kernels.convolve(convolution, memory_of(convolution, torch.zeros(2, 3, 8192)), tokens, x)


# Tokens of a window, dimensions of its key and series, as DeepSeek-V4 has them.
COMPRESSIONS = ((128, 512, 1), (4, 512, 2))


def compress(ratio: int, dim: int, num_series: int) -> None:
    """Launch a compression of two tokens."""
    x, bias = torch.zeros(2, dim * num_series, dtype=torch.bfloat16), torch.zeros(ratio, dim)
    operation = Compression(bias.repeat(1, num_series), num_series)
    places = (torch.zeros(2, dtype=torch.int64),) * 2
    TritonStates().compress(operation, torch.zeros(2, *ring_shape(operation)), *places, x, x)


def mix(dtype: torch.dtype) -> None:
    """Launch the mixing of two tokens' residual streams with DeepSeek-V4-Flash's sizes."""
    n, rows, kernels = 4, 24, hyper_connections.TritonStreams()
    streams, matrix = torch.zeros(2, n, 4096, dtype=dtype), torch.zeros(rows, n * 4096)
    connection = HyperConnection(1e-6, 1e-6, 2.0, 0.0, 20)
    out, weights = kernels.mix_in(connection, streams, matrix, torch.zeros(rows), torch.zeros(3))
    kernels.mix_out(out, weights, streams)


def memory_of(operation: StateOperation, states: torch.Tensor) -> StateMemory:
    """Return states with a log of drafted tokens."""
    shape = len(states), 2, MOST_DRAFTED, logged_values(operation)
    return StateMemory(states, torch.zeros(shape))


def do_chains(num_tokens: int) -> None:
    """Launch a decay in fp32 of bf16 values, and a gate with one number per token."""
    bf16 = torch.bfloat16
    x, bias = torch.zeros(num_tokens, 1, 32, dtype=bf16), torch.zeros(32)
    decay = chains.Chain((0, 8, 3, 9), (0, 3, 4, 2), (0, 1, 4, 5), (0, 0, 0, 0), ())
    chains.chain([x, bias, bias], decay, x.shape, torch.float32)
    rows, gate = torch.zeros(num_tokens, 2048, dtype=bf16), torch.zeros(num_tokens, 1, dtype=bf16)
    gated = chains.Chain((2, 9, 8, 9), (2, 0, 5, 6), (2, 4, 1, 3), (1, 1, 1, 1), (0.5,))
    chains.chain([rows, rows, gate], gated, rows.shape, bf16)


SMALL = ((2048, 128, 128, 8), (2880, 64, 32, 4), (7168, 256, 512, 10), (2816, 256, 128, 8))


def hand_layers_over(
    num_tokens: int, dtype: torch.dtype, *, layers: Sequence[int], wait_seconds: float
) -> None:
    """Launch the hand-over of layers of this many tokens; if they wait, kernels ring and poll."""
    num_experts, top_k, hidden_size = 128, 8, 2048
    pairs = num_tokens * top_k
    words, index = torch.zeros(pairs, dtype=torch.int32), torch.zeros(num_tokens, top_k).long()
    weights, rows = torch.zeros(num_tokens, top_k), torch.zeros(pairs, hidden_size)
    hidden = torch.zeros(num_tokens, hidden_size, dtype=dtype)
    word = words[:1]
    waits = handing.WaitWords(word, word)
    box = handing.MailboxTensors(
        word, word, words, words, weights, words.long(), word, words, hidden, rows, waits
    )
    table, rings = torch.zeros(num_experts, dtype=torch.int64), wait_seconds > 0
    addresses = handing.publish(box, table, hidden, index, weights, rings=rings)
    matrix, residual = torch.zeros(num_experts, hidden_size, dtype=dtype), torch.zeros(hidden_size)
    for bias, scoring in ((None, ""), *((matrix[:, 0], scoring) for scoring in SCORINGS)):
        router = LookAheadRouter(matrix, bias, residual, scoring)
        handing.publish_guess(box, handing.NextRouter(router, hidden), index, num_experts)
    for layer in layers:
        handing.take_fetched(
            box, addresses, index, num_experts, layer=layer, wait_seconds=wait_seconds
        )
        handing.combine(
            box, rows, addresses, index, weights, num_experts, hidden,
            layer=layer, wait_seconds=wait_seconds,
        )  # fmt: skip


def hand_over_launches(num_tokens: int) -> list[Launch]:
    """Return the launches of a layer's hand-over; `code_of` prints the last ones."""
    launches = noted_launches_of(KERNELS)
    for wait_seconds in (0.0, 9.0):
        hand_layers_over(num_tokens, torch.bfloat16, layers=[1], wait_seconds=wait_seconds)
    return [on_gpu(launch) for launch in launches]


def on_gpu(launch: Launch) -> Launch:
    """Return a launch whose tensors claim to be on a GPU."""
    knows = "on_gpu" in launch.constants
    return launch._replace(constants=launch.constants | ({"on_gpu": True} if knows else {}))


def dense_launches(format_name: str, num_tokens: int) -> list[Launch]:
    """Return the launches of packed linear layers for this many tokens, alone and grouped."""
    launches = noted_launches()
    multiply(format_name, num_tokens)
    return launches


def multiply(format_name: str, num_tokens: int) -> None:
    """Multiply packed linear layers for this many tokens, alone and grouped."""
    # Arbitrary contents: some formats cannot be quantised to.
    matrix = PackedMatrix.empty(512, 2048, find_format(format_name))
    weight = dense.copy_to_device(DenseWeight(matrix, torch.zeros(512)), torch.device("cpu"))
    rows = torch.zeros(num_tokens, 2048, dtype=torch.bfloat16)
    dense.multiply(rows, weight)
    if dense.can_join(num_tokens, weight):
        dense.multiply_together(rows, [weight] * dense.MOST_TOGETHER)


def code_of(launches: list[Launch], capability: int) -> dict[str, list[str]]:
    """Return each kernel's memory accesses and matrix products as lines of text."""
    words = ("atom.", "ld.", "st.", "fence.", "nanosleep", "globaltimer", "bar.", "fma.", ".f32")
    return {
        launch.kernel.__name__: [
            line.strip()
            for line in compiled(launch, capability).asm["ptx"].splitlines()
            if any(word in line for word in words)
        ]
        for launch in launches
    }


def main() -> None:
    """Compile the kernels and print the results."""
    if sys.argv[1] == "--code":
        print(json.dumps([{"code": code_of(hand_over_launches(8), int(sys.argv[2]))}]))
        return
    capabilities = [int(argument) for argument in sys.argv[1:]]
    steps = [
        (str(case), launches_of(attend, case, capabilities[number % len(capabilities)]))
        for number, case in enumerate(CASES)
    ]
    steps += [(str(case), launches_of(do_small, *case)) for case in SMALL]
    steps += [
        (f"{f}, {n} rows", dense_launches(f, n)) for f in ("int8", "q6_k") for n in (1, 8, 40)
    ]
    steps += [(str(form), launches_of(advance, form)) for form in STATES]
    steps += [(str(each), launches_of(compress, *each)) for each in COMPRESSIONS]
    steps += [("streams", launches_of(mix, torch.bfloat16))]
    steps += [("an indexer", launches_of(select, torch.bfloat16))]
    steps += [(f"{rows} rows", launches_of(do_chains, rows)) for rows in (1, 8)]
    for case in WINDOWS:
        capability = capabilities[len(steps) % len(capabilities)]
        steps.append((str(case), launches_of(attend_in_windows, case, capability)))
    steps += [(f"{rows} rows", hand_over_launches(rows)) for rows in (1, 8)]
    found: list[dict[str, Any]] = [
        result_of(case, launch, capabilities[number % len(capabilities)])
        for number, (case, launches) in enumerate(steps)
        for launch in launches
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
