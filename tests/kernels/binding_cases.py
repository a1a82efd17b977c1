"""A valid call of every native function that takes memory."""

import math
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.generate.sampling import SamplingRule
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads, DenseWeight, pack_dense
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.packed import PackedMatrix
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.native import native_layout

_FORMAT = find_format("int8-g32")
_PAGES = _native.slot_bytes(0, 64, 64, False)
TOKENS, HEADS, DIM, EXPERTS, TOP_K, HIDDEN = 3, 2, 16, 4, 2, 32


class Case(NamedTuple):
    """A call with its arguments, and which of its tensors may have any size, stride or type."""

    call: Callable[..., object]
    args: Sequence[Any]
    any_size: Sequence[int] = ()
    larger: Sequence[int] = ()
    any_stride: Sequence[int] = ()
    any_type: Sequence[int] = ()
    numbers: Sequence[int] = ()
    then: Callable[[], object] | None = None
    """Uses the arguments that the call has stored."""


@cache
def _threads() -> CpuThreads:
    return CpuThreads(num_threads=1)


@cache
def _layout() -> ExpertLayout:
    return ExpertLayout(_FORMAT, HIDDEN, 32, is_gated=True, has_bias=False)


def _floats(*shape: int) -> Tensor:
    return torch.zeros(shape)


def _ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _bytes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _pages(*shape: int) -> Tensor:
    memory = _bytes(math.prod(shape) + 4096)
    return memory[-memory.data_ptr() % 4096 :][: math.prod(shape)].view(shape)


def _weight() -> DenseWeight:
    return pack_dense(_floats(16, HIDDEN), None, _FORMAT)


def _compressed_attention() -> _native.AttentionLayer:
    """Return arguments of attention with compressed keys beside a window's keys."""
    layer = _attention(is_joint=True)
    (keys,) = _kept(_bytes(1, 32, layer.joint_key_bytes))
    layer.set_compressed(keys, 2)
    return layer


def _biased_attention() -> _native.AttentionLayer:
    layer = _attention(is_joint=False)
    layer.set_bias(*_kept(_floats(2, 5 + 2 * _MARGIN)))
    return layer


def _attention(*, is_joint: bool) -> _native.AttentionLayer:
    layer = _native.AttentionLayer(0, HEADS, 1, DIM, DIM, 0.25, 0.0, 0, None, is_joint)
    blocks = [_bytes(1, 1, 4, n) for n in (layer.key_block_bytes, layer.value_block_bytes)]
    layer.set_cache(*blocks)
    _KEPT.extend(blocks)
    return layer


_MARGIN = 64  # of profiles of a bias by distance, on both sides
_KEPT: list[object] = []  # memory whose addresses native objects have


def _kept(*tensors: Tensor) -> tuple[Tensor, ...]:
    _KEPT.extend(tensors)
    return tensors


def _coordinator() -> _native.StepCoordinator:
    return _native.StepCoordinator([_routed()], 1, "")


def _routed() -> _native.RoutedLayer:
    (buffers,) = _kept(_bytes(EXPERTS, _layout().num_bytes))
    return _native.RoutedLayer(native_layout(_layout()), 0, 1.0, float("inf"), 0.0, buffers)


def _tokens_of_experts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return addresses, row_begin, row_token and hidden; each expert has one row, of token 0."""
    (buffers,) = _kept(_bytes(EXPERTS, _layout().num_bytes))
    begin = torch.arange(EXPERTS + 1, dtype=torch.int32)
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    return addresses, begin, _int32(EXPERTS), _floats(TOKENS, HIDDEN)


def _routing() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights, out = _floats(TOKENS, TOP_K), _floats(TOKENS, HIDDEN)
    return _floats(TOKENS, HIDDEN), _ints(TOKENS, TOP_K), weights, out


def engine_cases() -> dict[str, Case]:
    """Return the calls that compute immediately."""
    threads, layout, weight = _threads(), native_layout(_layout()), _weight()
    engine, dense, attention = threads.engine, threads.dense, threads.attention
    of_experts = *_tokens_of_experts(), _floats(EXPERTS, HIDDEN)
    run = layout, _layout().num_bytes, 0, 1.0, 1.0, 0.0, *of_experts
    project = layout, _layout().num_bytes, True, *_tokens_of_experts(), _floats(EXPERTS, 64)
    sums = _floats(5, DIM), _int32(TOKENS, TOP_K), _floats(TOKENS, TOP_K), _floats(TOKENS, DIM)
    grouped = [weight.native] * 2, _floats(TOKENS, 2, HIDDEN), _floats(TOKENS, 2, 16)
    one = [weight.native], _floats(TOKENS, HIDDEN), [_floats(TOKENS, 16)]
    read = weight.native, _ints(TOKENS), _floats(TOKENS, HIDDEN)
    ahead = _native.LookAhead([(weight.native, [], 0)] * 2, HIDDEN)
    compressed, biased = _compressed_attention(), _biased_attention()
    head = _floats(1, TOKENS, DIM)
    where = _ints(TOKENS), torch.arange(TOKENS)
    queries = _floats(HEADS, TOKENS, DIM), _int32(TOKENS, 2), _floats(TOKENS, HEADS, DIM)
    optional = _floats(HEADS, TOKENS, 2), _floats(TOKENS, HEADS)
    sampler = _native.TokenSampler("", SamplingRule(temperature=1.0, repetition_penalty=2.0))
    assert sampler.choose(_floats(8), array("q", [1, 2]), 0.5) < 8
    rows = _int32(EXPERTS + 1), 1, _floats(TOKENS, HIDDEN), _floats(EXPERTS, HIDDEN)
    started = engine, _routed(), range(EXPERTS), False, list(range(EXPERTS + 1)), *rows
    of_bytes, summed = (_native.advise_huge_pages, (_bytes(64),)), (_bytes(64), 0)
    return {
        "ExpertEngine.run": Case(engine.run, run, any_size=[3]),
        "ExpertEngine.project": Case(engine.project, project, any_size=[3]),
        "ExpertEngine.add_rows": Case(engine.add_rows, sums, any_size=[0]),
        "ExpertEngine.read_all": Case(engine.read_all, (_bytes(64),), any_size=[0], any_type=[0]),
        "advise_huge_pages": Case(*of_bytes, any_size=[0], any_type=[0]),
        "crc32c": Case(_native.crc32c, summed, any_size=[0], any_type=[0]),
        "crc32c_portable": Case(_native.crc32c_portable, summed, any_size=[0], any_type=[0]),
        "DenseEngine.run": Case(dense.run, one),
        "DenseEngine.run_groups": Case(dense.run_groups, grouped),
        "DenseEngine.read": Case(dense.read, read),
        "LookAhead.learn": Case(ahead.learn, (0, _floats(TOKENS, HIDDEN)), any_size=[0]),
        "LookAhead.predict": Case(
            ahead.predict, (dense, 0, _floats(TOKENS, HIDDEN), 2), any_size=[0]
        ),
        "RoutedExperts.run": Case(threads.experts.run, (_routed(), *_routing())),
        "AttentionEngine.append": Case(
            attention.append, (compressed, *where, head, head, head.clone())
        ),
        "AttentionEngine.attend": Case(attention.attend, (biased, *where, *queries, *optional)),
        "TokenSampler.choose": Case(
            sampler.choose, (_floats(8), torch.tensor([1, 2]), 0.5), any_size=[0, 1]
        ),
        "StartedBatch": Case(_native.StartedBatch, started, any_size=[1], larger=[0, 2]),
    }


def making_cases() -> dict[str, Case]:
    """Return the calls that create objects for other calls."""
    layout, packed = native_layout(_layout()), PackedMatrix.empty(16, HIDDEN, _FORMAT)
    sizes = 1, packed.format.group_size, 16, HIDDEN, HIDDEN
    routed = layout, 0, 1.0, 1.0, 0.0, _bytes(EXPERTS, _layout().num_bytes)
    no_sums: list[int] = []
    slots = __file__, 0, 64, 64, no_sums, EXPERTS, _pages(2, _PAGES), None
    on_disk = [_native.SlotLayer(*slots)], _pages(2, _PAGES), 1, 1, 4096, 1.0
    tables = _native.RowTables([([(__file__, 0, 8)], 64)], 1, 1.0)
    numbers = 0, HEADS, 1, DIM, DIM, 0.25, 0.0, 0
    layer, joint = (_native.AttentionLayer(*numbers, None, is_joint) for is_joint in (False, True))
    index = _native.IndexLayer()
    blocks = [_bytes(2, 1, 4, n) for n in (layer.key_block_bytes, layer.value_block_bytes)]
    form = HEADS, 1, DIM, DIM, 2, True, False, 1.0
    of_pairs = _floats(1, DIM, 16), _floats(HEADS, DIM), _floats(2, HEADS, 1, DIM, 16)
    recurrence = _native.Recurrence(*form, *_kept(*of_pairs))
    log = _floats(2, 7, recurrence.logged_values)
    taps = _floats(4, 8), _floats(8), True, _floats(2, 3, 8)
    convolution = _native.ShortConvolution(*taps)
    windows = 2, _floats(4, 2 * DIM), _floats(2, 9, 2, 2 * DIM)
    _KEPT.extend(taps)
    return {
        "make_dense_matrix": Case(
            _native.make_dense_matrix, (*sizes, packed.data, packed.scales, _floats(16))
        ),
        "RoutedLayer": Case(_native.RoutedLayer, routed, any_size=[0]),
        "SlotLayer": Case(_native.SlotLayer, slots, any_size=[0]),
        "HostSlots": Case(_native.HostSlots, on_disk, any_size=[0]),
        "RowTables.read": Case(tables.read, (0, _ints(3), _bytes(3, 64)), any_type=[1]),
        "AttentionLayer": Case(_native.AttentionLayer, (*numbers, _floats(HEADS), False)),
        "AttentionLayer.set_cache": Case(layer.set_cache, blocks),
        "AttentionLayer.set_compressed": Case(
            joint.set_compressed, (_bytes(2, 8, joint.joint_key_bytes), 2), any_size=[0]
        ),
        "AttentionLayer.set_bias": Case(
            layer.set_bias, (_floats(2, 5 + 2 * _MARGIN),), any_size=[0]
        ),
        "AttentionLayer.set_always_seen": Case(layer.set_always_seen, (_ints(2),), any_size=[0]),
        "IndexLayer.set_keys": Case(index.set_keys, (_floats(2, 8, DIM),), any_size=[0]),
        "Recurrence": Case(_native.Recurrence, (*form, *of_pairs), any_size=[2]),
        "Recurrence.keep_drafts": Case(recurrence.keep_drafts, (_ints(2), log)),
        "WindowCompression": Case(_native.WindowCompression, windows, any_size=[0, 1]),
        "ShortConvolution": Case(_native.ShortConvolution, taps, any_size=[2]),
        "ShortConvolution.keep_drafts": Case(convolution.keep_drafts, (_ints(2), _floats(2, 7, 8))),
    }


def placing_cases() -> dict[str, Case]:
    """Return the calls that write packed matrices."""
    group, cols = _FORMAT.group_size or 0, 128
    blocks, small = (PackedMatrix.empty(32, cols, _FORMAT).blocks for _ in range(2))
    rounding = 1, group, cols, _floats(32, cols), _floats(cols), blocks.words, blocks.scales
    place = 1, 32, cols, blocks.words, blocks.scales, _floats(1)
    of_32 = 1, 32, cols, small.words, small.scales, None
    rows = 8, _bytes(32, cols // 32 * 34), torch.arange(32), None
    fields = _int32(32, cols // 4), 0, 0, group, 1, 1, torch.zeros(32, cols // group).half(), None
    placing = 1, [(of_32, rows)], [(place, fields)]
    return {
        "quantize": Case(_native.quantize, ("", 1, True, [rounding]), any_size=[0], any_stride=[0]),
        "rearrange_rows": Case(
            _native.rearrange_rows, placing, larger=[2, 7, 8], any_stride=[7, 8]
        ),
    }


def _start_nothing(twin: _native.TwinStream, calls: Sequence[Any]) -> None:
    twin.start(calls, 0)


def coordinator_cases() -> dict[str, Case]:
    """Return the calls of captured steps."""
    coordinator, table = _coordinator(), _ints(1, EXPERTS)
    box = _native.MailboxLayout(1, TOKENS, TOP_K, HIDDEN, 0)
    number = coordinator.add_mailbox(TOKENS, TOP_K, 0)
    (slots,) = _kept(_bytes(2, _layout().num_bytes))
    addresses = [slot.data_ptr() for slot in slots]
    managed = table, addresses, slots.shape[1], None, 0.0, None, None
    made = coordinator, number, table, _threads().engine, 0, 0
    twin, call = _native.TwinStream(*made), (0, *_routing())
    twin.set_patience(0.01)
    _KEPT.extend((coordinator, twin, table))
    start = partial(_start_nothing, twin)
    return {
        "StepCoordinator.add_mailbox": Case(
            coordinator.add_mailbox, (TOKENS, TOP_K, 0, _bytes(box.num_bytes))
        ),
        "StepCoordinator.manage_slots": Case(coordinator.manage_slots, managed),
        "TwinStream": Case(_native.TwinStream, made),
        "TwinStream.run": Case(twin.run, (call,), then=twin.join),
        "TwinStream.add_to": Case(twin.add_to, (_threads().program(), call), then=twin.join),
        "TwinStream.start": Case(start, ([call],), then=twin.join),
    }


def _operations() -> dict[str, tuple[Any, ...]]:
    """Return the arguments of each operation of a program."""
    x, heads, out = _floats(TOKENS, DIM), _floats(TOKENS, HEADS, DIM), _floats(TOKENS, DIM)
    where, weight = (_ints(TOKENS), torch.arange(TOKENS)), _weight()
    attention, head = _compressed_attention(), _floats(1, TOKENS, DIM)
    compression = _native.WindowCompression(
        2, *_kept(_floats(4, 2 * DIM), _floats(1, 9, 2, 2 * DIM))
    )
    taps, before = _kept(_floats(4, DIM), _floats(1, 3, DIM))
    convolution = _native.ShortConvolution(taps, None, True, before)
    convolution.keep_drafts(*_kept(_ints(1), _floats(1, 7, DIM)))
    (states,) = _kept(_floats(1, HEADS, 1, DIM, 16))
    recurrence = _native.Recurrence(HEADS, 1, DIM, DIM, 0, True, False, 1.0, None, None, states)
    recurrence.keep_drafts(*_kept(_ints(1), _floats(1, 7, recurrence.logged_values)))
    _KEPT.extend((weight, convolution, recurrence, compression))
    index = _native.IndexLayer()
    (keys,) = _kept(_floats(1, 8, DIM))
    index.set_keys(keys)
    logits, chosen = _floats(TOKENS, EXPERTS), (_floats(TOKENS, TOP_K), _ints(TOKENS, TOP_K))
    one_head, rate = _floats(TOKENS, 1, DIM), _floats(TOKENS, HEADS)
    streams, of_streams = _floats(TOKENS, 2, DIM), _floats(TOKENS, 2 + 2 * 2)
    return {
        "norm": (1e-6, True, x, _floats(DIM), 1, x, out),
        "rotary": (heads, x, x, _floats(TOKENS, HEADS, DIM)),
        "rotary_pairs": (heads, x, _floats(TOKENS, HEADS, DIM)),
        "choice": (TOP_K, True, 1.0, logits, *chosen),
        "ranked_choice": (TOP_K, 2, 1, 1, True, 0.0, 1.0, logits, logits, *chosen),
        "elementwise": (20, out, x, x),
        "reduction": (2, x, _floats(TOKENS), _ints(TOKENS)),
        "softmax": (x, out),
        "layer_norm": (x, 1e-6, _floats(DIM), _floats(DIM), out),
        "greatest": (logits, *chosen),
        "lookup": (_floats(8, DIM), 0, _ints(TOKENS, DIM), out),
        "scatter": (x, 0, _ints(TOKENS, DIM), _floats(8, DIM)),
        "product": (x, _floats(DIM, 8), _floats(TOKENS, 8)),
        "selection": (index, *where, 1.0, x, heads, rate, _int32(TOKENS, 2)),
        "dense": ([weight.native], _floats(TOKENS, HIDDEN), [_floats(TOKENS, 16)]),
        "groups": ([weight.native] * 2, _floats(TOKENS, 2, HIDDEN), _floats(TOKENS, 2, 16)),
        "rows": (weight.native, _ints(TOKENS), _floats(TOKENS, HIDDEN)),
        "convolution": (convolution, *where, False, x, out),
        "recurrence": (recurrence, *where, False, one_head, one_head, heads, rate, rate,
                       _floats(TOKENS, HEADS, DIM)),
        "attention": (attention, *where, _floats(HEADS, TOKENS, DIM), head, head.clone(),
                      _int32(TOKENS, 2), _floats(TOKENS, HEADS, DIM), head.clone(),
                      None, _floats(TOKENS, HEADS)),
        "compression": (compression, *where, *(_floats(TOKENS, 2 * DIM) for _ in range(2)), out),
        "mix_in": (1e-6, 1e-6, 2.0, 0.0, 3, streams, _floats(8, 2 * DIM), _floats(8), _floats(3),
                   out, of_streams),
        "mix_out": (x, of_streams, streams, streams.clone()),
        "experts": (_routed(), *_routing()),
    }  # fmt: skip


def program_cases() -> dict[str, Case]:
    """Return the operations of programs, each in a program of its own."""
    strides = {
        "elementwise": [0, 1, 2], "reduction": [0], "softmax": [0], "layer_norm": [0],
        "greatest": [0], "lookup": [0, 1], "scatter": [0, 1, 2], "product": [0, 1, 2],
        "selection": [2, 3, 4],
    }  # fmt: skip
    sizes = {"lookup": [0], "scatter": [2]}  # places to choose from
    numbers = {"elementwise": [1, 2], "scatter": [0]}  # that may stand for a tensor
    found = dict[str, Case]()
    for name, args in _operations().items():
        program, size, stride = _threads().program(), sizes.get(name, ()), strides.get(name, ())
        found[f"Program.add_{name}"] = Case(
            getattr(program, f"add_{name}"), args, any_size=size, any_stride=stride,
            numbers=numbers.get(name, ()), then=program.run,
        )  # fmt: skip
    return found


@cache
def cases() -> dict[str, Case]:
    """Return all calls by the name of the function."""
    more = making_cases() | placing_cases() | coordinator_cases() | program_cases()
    return engine_cases() | more


def public_names() -> set[str]:
    """Return the names of all functions, classes and methods of the native module."""
    found = set()
    for name, value in vars(_native).items():
        if name.startswith("_"):
            continue
        found.add(name)
        if isinstance(value, type):
            methods = (n for n, v in vars(value).items() if callable(v) and not n.startswith("_"))
            found |= {f"{name}.{method}" for method in methods}
    return found
