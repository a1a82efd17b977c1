from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
from torch import Tensor

# What has an address comes as a tensor in the host's memory: TypeError for another one.
_Memory = Tensor | npt.NDArray[Any] | array[int]

class CpuFeatures:
    vendor: str
    instruction_sets: list[str]
    l1_data_bytes: int
    l2_bytes: int
    l3_bytes: int

class ProjectionLayout:
    format: int
    group: int
    cols: int
    data: int
    scales: int
    bias: int
    def __init__(self) -> None: ...

class ExpertLayout:
    up: ProjectionLayout
    down: ProjectionLayout
    hidden_size: int
    inner_rows: int
    is_gated: bool
    def __init__(self) -> None: ...

class ExpertEngine:
    isa: str
    num_threads: int
    def __init__(self, num_threads: int, isa: str) -> None: ...
    def run(
        self,
        layout: ExpertLayout,
        expert_bytes: int,
        activation: int,
        alpha: float,
        limit: float,
        offset: float,
        experts: Tensor,
        row_begin: Tensor,
        row_token: Tensor,
        hidden: Tensor,
        out: Tensor,
        /,
    ) -> None: ...
    def project(
        self,
        layout: ExpertLayout,
        expert_bytes: int,
        is_up: bool,
        experts: Tensor,
        row_begin: Tensor,
        row_token: Tensor,
        inputs: Tensor,
        out: Tensor,
        /,
    ) -> None: ...
    def add_rows(self, rows: Tensor, row_of: Tensor, weights: Tensor, out: Tensor, /) -> None: ...
    def wake(self) -> None: ...
    def bind_workers(self, processors: list[int], /) -> None: ...
    def read_all(self, data: Tensor, /) -> int: ...
    def multiply(self, bits: int, count_per_thread: int, /) -> int: ...

def detect_cpu_features() -> CpuFeatures: ...
def available_isas() -> list[str]: ...

# Format, group, padded columns, weight, importance, blocks of codes and of scales.
Rounding = tuple[int, int, int, Tensor, Tensor | None, Tensor, Tensor | None]
# Format, rows, columns, blocks of codes and of scales, factor.
PackedPlace = tuple[int, int, int, Tensor, Tensor, Tensor | None]
# Kind, bytes, order, table.
BlockRows = tuple[int, _Memory, Tensor | None, Tensor | None]
# Words, places, flip, group, repeats, rows of a scale, scales, minima.
FieldRows = tuple[Tensor, int, int, int, int, int, Tensor, Tensor | None]

def quantize(
    isa: str, num_threads: int, has_search: bool, roundings: Sequence[Rounding], /
) -> bool: ...
def block_bytes(format: int, /) -> int: ...
def block_cols(format: int, /) -> int: ...
def grid_lines(format: int, /) -> list[int]: ...
def rearrange_rows(
    num_threads: int,
    blocks: Sequence[tuple[PackedPlace, BlockRows]],
    fields: Sequence[tuple[PackedPlace, FieldRows]],
    /,
) -> bool: ...
def advise_huge_pages(memory: Tensor, /) -> bool: ...
def crc32c(data: _Memory, before: int, /) -> int: ...
def crc32c_portable(data: _Memory, before: int, /) -> int: ...
def join_crc32c(first: int, second: int, second_bytes: int, /) -> int: ...

class DenseMatrix: ...

def make_dense_matrix(
    format: int,
    group: int,
    rows: int,
    in_features: int,
    cols: int,
    data: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    /,
) -> DenseMatrix: ...

class DenseEngine:
    def __init__(self, engine: ExpertEngine, /) -> None: ...
    def run(
        self, matrices: Sequence[DenseMatrix], x: Tensor, outputs: Sequence[Tensor], /
    ) -> None: ...
    def run_groups(self, matrices: Sequence[DenseMatrix], x: Tensor, out: Tensor, /) -> None: ...
    def read(self, matrix: DenseMatrix, numbers: Tensor, out: Tensor, /) -> None: ...

class RoutedLayer:
    def __init__(
        self,
        layout: ExpertLayout,
        activation: int,
        alpha: float,
        limit: float,
        offset: float,
        experts: Tensor,
        slots: HostSlots | None = None,
        number: int = 0,
        /,
    ) -> None: ...

class RoutedExperts:
    def __init__(self, engine: ExpertEngine, /) -> None: ...
    def run(
        self,
        layer: RoutedLayer,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        out: Tensor,
        /,
    ) -> int: ...

class AttentionLayer:
    def __init__(
        self,
        kv_type: int,
        num_heads: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        scale: float,
        softcap: float,
        window: int,
        sinks: Tensor | None,
        is_joint: bool,
        /,
    ) -> None: ...
    @property
    def key_block_bytes(self) -> int: ...
    @property
    def value_block_bytes(self) -> int: ...
    def set_cache(self, keys: Tensor, values: Tensor, /) -> None: ...
    @property
    def joint_key_bytes(self) -> int: ...
    def set_compressed(self, keys: Tensor, ratio: int, /) -> None: ...
    def set_always_seen(self, counts: Tensor, /) -> None: ...
    def set_chunk(self, chunk: int, /) -> None: ...
    def set_selection(self, block: int, by_head: bool, /) -> None: ...
    def set_bias(self, profiles: Tensor, /) -> None: ...

class AttentionEngine:
    def __init__(self, engine: ExpertEngine, /) -> None: ...
    def append(
        self,
        layer: AttentionLayer,
        slots: Tensor,
        positions: Tensor,
        key: Tensor,
        value: Tensor,
        compressed: Tensor | None = None,
        /,
    ) -> None: ...
    def attend(
        self,
        layer: AttentionLayer,
        slots: Tensor,
        positions: Tensor,
        query: Tensor,
        selected: Tensor | None,
        out: Tensor,
        bias_states: Tensor | None = None,
        sinks: Tensor | None = None,
        /,
    ) -> None: ...

class TokenSampler:
    """`rule` is a `tandem.generate.sampling.SamplingRule`, read once."""

    def __init__(self, isa: str, rule: object) -> None: ...
    def choose(self, logits: Tensor, seen: array[int] | None, uniform: float, /) -> int: ...

class ShortConvolution:
    """A layer's convolution; the caller keeps its tensors alive."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        has_silu: bool,
        states: Tensor,
        /,
    ) -> None: ...
    def keep_drafts(self, kept: Tensor, log: Tensor, /) -> None: ...

class Recurrence:
    """A layer's recurrence; the caller keeps its tensors alive."""

    def __init__(
        self,
        num_heads: int,
        num_key_heads: int,
        key_dim: int,
        value_dim: int,
        decay_kind: int,
        is_delta: bool,
        is_normalised: bool,
        scale: float,
        factor: Tensor | None,
        skip: Tensor | None,
        states: Tensor,
        /,
    ) -> None: ...
    @property
    def logged_values(self) -> int: ...
    def keep_drafts(self, kept: Tensor, log: Tensor, /) -> None: ...

class WindowCompression:
    def __init__(self, num_series: int, bias: Tensor, states: Tensor, /) -> None: ...

class RecurrentEngine:
    def __init__(self, engine: ExpertEngine, /) -> None: ...

class IndexLayer:
    """The index keys of a layer, at the place that the latest `set_keys` gave."""

    def __init__(self) -> None: ...
    def set_keys(self, keys: Tensor, ratio: int = 1, /) -> None: ...

class Program:
    """The caller of `add_*` keeps the tensors, matrices and layers alive."""

    def __init__(
        self,
        engine: ExpertEngine,
        dense: DenseEngine,
        attention: AttentionEngine,
        experts: RoutedExperts,
        recurrent: RecurrentEngine,
        /,
    ) -> None: ...
    def add_convolution(
        self,
        layer: ShortConvolution,
        slots: Tensor,
        positions: Tensor,
        have_drafts: bool,
        x: Tensor,
        out: Tensor,
        /,
    ) -> None: ...
    def add_recurrence(
        self,
        layer: Recurrence,
        slots: Tensor,
        positions: Tensor,
        have_drafts: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        rate: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...
    def add_norm(
        self,
        eps: float,
        rounding: int,
        x: Tensor,
        weight: Tensor | None,
        gate_kind: int,
        gate: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...
    def add_rotary(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, /) -> None: ...
    def add_rotary_pairs(self, x: Tensor, turns: Tensor, out: Tensor, /) -> None: ...
    def add_choice(
        self,
        top_k: int,
        is_normalised: bool,
        scale: float,
        logits: Tensor,
        weights: Tensor,
        index: Tensor,
        /,
    ) -> None: ...
    def add_ranked_choice(
        self,
        top_k: int,
        groups: int,
        kept_groups: int,
        best_of_group: int,
        is_normalised: bool,
        epsilon: float,
        scale: float,
        scores: Tensor,
        ranks: Tensor,
        weights: Tensor,
        index: Tensor,
        /,
    ) -> None: ...
    def add_elementwise(
        self,
        kind: int,
        out: Tensor,
        a: Tensor | float,
        b: Tensor | float | None = None,
        c: Tensor | float | None = None,
        /,
    ) -> None: ...
    def add_reduction(self, kind: int, x: Tensor, out: Tensor, index: Tensor | None, /) -> None: ...
    def add_softmax(self, x: Tensor, out: Tensor, /) -> None: ...
    def add_layer_norm(
        self, x: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None, out: Tensor, /
    ) -> None: ...
    def add_greatest(self, x: Tensor, out: Tensor, index: Tensor, /) -> None: ...
    def add_lookup(self, x: Tensor, dim: int, index: Tensor, out: Tensor, /) -> None: ...
    def add_scatter(self, x: Tensor | float, dim: int, index: Tensor, out: Tensor, /) -> None: ...
    def add_product(self, a: Tensor, b: Tensor, out: Tensor, /) -> None: ...
    def add_selection(
        self,
        layer: IndexLayer,
        slots: Tensor,
        positions: Tensor,
        scale: float,
        key: Tensor,
        query: Tensor,
        weights: Tensor | None,
        out: Tensor,
        block: int = 0,
        num_local: int = 0,
        /,
    ) -> None: ...
    def add_dense(
        self, matrices: Sequence[DenseMatrix], x: Tensor, outputs: Sequence[Tensor], /
    ) -> None: ...
    def add_groups(self, matrices: Sequence[DenseMatrix], x: Tensor, out: Tensor, /) -> None: ...
    def add_rows(self, matrix: DenseMatrix, numbers: Tensor, out: Tensor, /) -> None: ...
    def add_attention(
        self,
        layer: AttentionLayer,
        slots: Tensor,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        selected: Tensor | None,
        out: Tensor,
        compressed: Tensor | None = None,
        bias_states: Tensor | None = None,
        sinks: Tensor | None = None,
        /,
    ) -> None: ...
    def add_compression(
        self,
        layer: WindowCompression,
        slots: Tensor,
        positions: Tensor,
        values: Tensor,
        gates: Tensor,
        out: Tensor,
        /,
    ) -> None: ...
    def add_mix_in(
        self,
        norm_eps: float,
        eps: float,
        output_factor: float,
        output_eps: float,
        num_rounds: int,
        streams: Tensor,
        matrix: Tensor,
        base: Tensor,
        scales: Tensor,
        out: Tensor,
        weights: Tensor,
        /,
    ) -> None: ...
    def add_mix_out(self, y: Tensor, weights: Tensor, streams: Tensor, out: Tensor, /) -> None: ...
    def add_experts(
        self,
        layer: RoutedLayer,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        out: Tensor,
        /,
    ) -> int: ...
    def num_active(self, number: int, /) -> int: ...
    def run(self) -> None: ...

class StartedBatch:
    def __init__(
        self,
        engine: ExpertEngine,
        layer: RoutedLayer,
        experts: Sequence[int],
        are_addresses: bool,
        begin: Sequence[int],
        row_token: Tensor,
        first_token: int,
        hidden: Tensor,
        out: Tensor,
        /,
    ) -> None: ...
    def finish(self) -> None: ...

class RuleStart:
    def __init__(self, deviations: int, /) -> None: ...

class NextUseTable:
    def __init__(
        self,
        num_experts: int,
        first_row: int,
        first_average: int,
        losses: Sequence[int],
        rate: float,
        shifts: tuple[int, int, int],
        predicted_shift: int,
        max_tokens: int,
        margins: tuple[int, int],
        start: RuleStart,
        /,
    ) -> None: ...
    def note(
        self,
        loaded: Sequence[int],
        tokens: Sequence[int],
        divisor: int,
        experts: Sequence[int],
        above: Sequence[int],
        /,
    ) -> None: ...
    def learn(self) -> None: ...
    def values(self) -> bytes: ...
    def resize(self, capacity: int, /) -> None: ...
    def followed(self) -> int: ...

# Of bins, how often seen and come true; layers until the next count, and between counts.
_Counts = tuple[Sequence[float], Sequence[float], int, int]

class RegressionPredictor:
    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        first_row: int,
        num_buckets: int,
        rate: float,
        token_rate: float,
        max_tokens: int,
        counts: _Counts,
        of_hints: _Counts,
        /,
    ) -> None: ...
    def load(
        self, before: Sequence[Sequence[int]], counts: _Counts, of_hints: _Counts, /
    ) -> None: ...
    def state(self) -> tuple[list[list[int]], _Counts, _Counts]: ...
    def begin_step(self, token_ids: Sequence[int], /) -> None: ...
    def hint(
        self, layer: int, experts: Sequence[int], tokens: Sequence[int], factor: int, /
    ) -> None: ...
    def is_hinted(self, layer: int, /) -> bool: ...
    def observe(self, layer: int, experts: Sequence[int], tokens: Sequence[int], /) -> None: ...
    def learn(self) -> None: ...
    def forecast(self, layer: int, /) -> tuple[bytes, list[float]] | None: ...

class Costs:
    def __init__(
        self,
        cpu: Sequence[float],
        gpu: Sequence[float],
        cpu_first: float,
        link: float,
        cpu_slowdown: float,
        link_slowdown: float,
        copy_wake: float,
        read: float,
        /,
    ) -> None: ...

def split_layer(
    costs: Costs,
    rule: int,
    is_never_worse_than_cpu: bool,
    max_fetches: int,
    experts: Sequence[int],
    tokens: Sequence[int],
    states: bytes,
    coming: Sequence[float],
    scores: memoryview,
    link_busy: float,
    places: bytes,
    /,
) -> tuple[list[int], list[int], float, float]: ...
def layer_entries(
    experts: Sequence[int],
    states: bytes | bytearray,
    scores: memoryview,
    first: int,
    members: Sequence[int],
    staged: Sequence[int],
    free_slots: int,
    fetched: Sequence[int],
    room: int,
    /,
) -> list[tuple[int, int]]: ...
def most_valued(
    states: bytes | bytearray, scores: memoryview, first: int, most: int, /
) -> list[int]: ...
def expected_ahead(
    predictor: RegressionPredictor,
    costs: Costs,
    most: int,
    copy_price: float,
    layer: int,
    states: bytes | bytearray,
    late: Sequence[int],
    begin: float,
    needed_at: float,
    room: int,
    in_graph: bool,
    /,
) -> list[int]: ...
def over_residents(
    predictor: RegressionPredictor,
    costs: Costs,
    copy_price: float,
    layer: int,
    states: bytes | bytearray,
    scores: memoryview,
    first: int,
    members: Sequence[int],
    free_slots: int,
    expected: Sequence[int],
    chances: int,
    /,
) -> tuple[list[tuple[int, int]], int]: ...
def known_ahead(
    costs: Costs,
    copy_price: float,
    experts: Sequence[int],
    tokens: Sequence[int],
    states: bytes | bytearray,
    late: Sequence[int],
    begin: float,
    needed_at: float,
    room: int,
    in_graph: bool,
    /,
) -> tuple[int, list[int]]: ...
def over_lowest(
    experts: Sequence[int],
    states: bytes | bytearray,
    scores: memoryview,
    first: int,
    members: Sequence[int],
    free_slots: int,
    entering: Sequence[int],
    /,
) -> list[tuple[int, int]]: ...
def known_reads(
    coming: Sequence[tuple[int, Sequence[int], bytes, int]], all: int, free: int, expected: int, /
) -> list[tuple[int, int, bool]]: ...
def likely_reads(
    likely: Sequence[tuple[int, int]], chances: Sequence[int], num_shared: int, /
) -> list[int]: ...
def updated_chance(chance: int, was_used: bool, /) -> int: ...

class LookAheadTrial:
    def __init__(self) -> None: ...
    def looks(self) -> bool: ...
    def end_step(self, num_tokens: int, seconds: float, /) -> None: ...

def may_look_ahead(chances: Sequence[int], step: int, /) -> bool: ...
def prompt_reads(on_device: bytes, scores: Sequence[int], most: int, /) -> list[int]: ...
def rank_last(on_device: bytes, scores: Sequence[int], /) -> list[int]: ...
def is_prompt(num_tokens: int, /) -> bool: ...
def may_lend(num_lent: int, num_shared: int, /) -> bool: ...
def may_take_room(num_free: int, waits: bool, /) -> bool: ...

class MailboxLayout:
    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        top_k: int,
        hidden_size: int,
        type: int,
        /,
    ) -> None: ...
    @property
    def doorbell(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def error(self) -> int: ...
    @property
    def choice(self) -> int: ...
    @property
    def is_hit(self) -> int: ...
    @property
    def weights(self) -> int: ...
    @property
    def fetched(self) -> int: ...
    @property
    def guessed(self) -> int: ...
    @property
    def guess(self) -> int: ...
    @property
    def layer_bytes(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def results(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

# State and slot by key, members and free slots by layer; keys that were prefetched, and slots.
_Resident = tuple[bytes, list[int], list[list[int]], list[list[int]], list[int], list[int]]
_SlotCopy = tuple[int, int, int, int]  # layer, expert, slot, victim or -1
# A layer, and the experts in ascending order that it will use, with their tokens.
_KnownLoad = tuple[int, Sequence[int], Sequence[int]]
_Arrival = tuple[int, int, float]  # layer, expert, seconds
# Layer, choice, hits, weights, experts on the CPU; seen, begun, ended, answered; fetched in time.
_LayerRecord = tuple[
    int, list[int], list[int], list[float], int, float, float, float, float, list[int]
]

# Layer and time; arrivals, entered, for one use; staging slots that it needed; prefetched.
_Decided = tuple[int, float, list[_Arrival], list[_SlotCopy], list[_SlotCopy], int, list[_SlotCopy]]

class StepPolicy:
    def __init__(
        self,
        costs: Costs,
        max_fetches: int,
        max_ahead: int,
        copy_price: float,
        tables: list[NextUseTable],
        predictor: RegressionPredictor | None,
        hint_factor: int,
        state: bytes,
        slot_of: Sequence[int],
        members: Sequence[Sequence[int]],
        free: Sequence[Sequence[int]],
        staging: Sequence[int],
        ahead: Sequence[int],
        free_ahead: Sequence[int],
        /,
    ) -> None: ...
    def load(
        self,
        state: bytes,
        slot_of: Sequence[int],
        members: Sequence[Sequence[int]],
        free: Sequence[Sequence[int]],
        staging: Sequence[int],
        ahead: Sequence[int],
        free_ahead: Sequence[int],
        link_free_at: float,
        pending: Sequence[int],
        /,
    ) -> None: ...
    def resident(self) -> _Resident: ...
    def link_free_at(self) -> float: ...
    def set_rule(self, rule: int, predicts: bool = False, asks: bool = False, /) -> None: ...
    def begin_step(
        self, dense_seconds: float, known: Sequence[_KnownLoad] = (), now: float = 0.0, /
    ) -> list[_SlotCopy]: ...
    def end_step(self) -> list[int]: ...
    def decide(
        self,
        layer: int,
        experts: Sequence[int],
        tokens: Sequence[int],
        now: float,
        guessed: Sequence[int] = (),
        guessed_tokens: Sequence[int] = (),
        places: bytes = b"",
        /,
    ) -> tuple[list[_SlotCopy], list[_SlotCopy], list[_SlotCopy]]: ...
    def copy_finished(self, layer: int, expert: int, now: float, /) -> None: ...
    def learn(self, layer: int, /) -> None: ...
    def warm_up(self, layer: int, /) -> None: ...

class StepLostError(RuntimeError): ...
class StepSlowError(StepLostError): ...

class DriverLink:
    def __init__(self, library: str, table: int, /) -> None: ...

class StepCoordinator:
    def __init__(self, layers: Sequence[RoutedLayer], num_threads: int, isa: str, /) -> None: ...
    def close(self) -> None: ...
    def set_hook(self, hook: Callable[[int], None] | None, /) -> None: ...
    def add_mailbox(
        self, num_rows: int, top_k: int, type: int, memory: Tensor | None = None, /
    ) -> int: ...
    def begin_step(self, number: int, patience: float, /) -> None: ...
    def finish_step(self, patience: float, /) -> None: ...
    def abort_step(self, patience: float, /) -> bool: ...
    def records(self) -> list[_LayerRecord]: ...
    def manage_slots(
        self,
        entries: _Memory,
        slots: Sequence[int],
        slot_bytes: int,
        policy: StepPolicy | None,
        bytes_per_second: float,
        before_copy: Callable[[], None] | None,
        link: DriverLink | None = None,
        /,
    ) -> None: ...
    def set_dense_seconds(self, seconds: float, /) -> None: ...
    def expect(self, known: Sequence[_KnownLoad], /) -> None: ...
    def take_decided(self) -> list[_Decided]: ...
    def submit(self, copies: Sequence[_SlotCopy], /) -> None: ...
    def clear(self, keys: Sequence[int], /) -> None: ...
    def clear_entries(self) -> None: ...
    def begin_copies(self) -> None: ...
    def take_arrivals(self) -> list[_Arrival]: ...
    def drain_copies(self) -> None: ...
    def copy_error(self) -> str: ...

# Layer, hidden, index, weights, out.
_TwinCall = tuple[int, Tensor, Tensor, Tensor, Tensor]

class TwinStream:
    def __init__(
        self,
        coordinator: StepCoordinator,
        mailbox: int,
        addresses: _Memory,
        engine: ExpertEngine,
        most_delay: int,
        seed: int,
        /,
    ) -> None: ...
    def run(self, call: _TwinCall, /) -> None: ...
    def add_to(self, program: Program, call: _TwinCall, /) -> None: ...
    def set_patience(self, seconds: float, /) -> None: ...
    def start(self, calls: Sequence[_TwinCall], stops_before: int, /) -> None: ...
    def set_dense_seconds(self, seconds: float, /) -> None: ...
    def set_guesses(self, guesses: Sequence[Sequence[int]], /) -> None: ...
    def times(self) -> list[tuple[float, float]]: ...
    def join(self) -> None: ...

def slot_bytes(first: int, stride: int, expert_bytes: int, has_sums: bool, /) -> int: ...

class SlotLayer:
    def __init__(
        self,
        path: str,
        first: int,
        stride: int,
        expert_bytes: int,
        sums: Sequence[int],
        num_experts: int,
        memory: Tensor,
        table: NextUseTable | None,
        /,
    ) -> None: ...

class SlotCounts:
    hits: int
    misses: int
    ahead: int
    likely: int
    likely_used: int
    device_hits: int
    device_misses: int
    kept: int
    read_bytes: int
    waited_seconds: float

class HeldExpert:
    def address(self) -> int: ...
    def has_come(self) -> bool: ...
    def wait(self) -> None: ...
    def keep(self) -> None: ...
    def let_go(self) -> None: ...

class LookAhead:
    def __init__(
        self,
        routers: Sequence[tuple[DenseMatrix | None, Sequence[float], int]],
        hidden_size: int,
        /,
    ) -> None: ...
    def learn(self, layer: int, values: Tensor, /) -> None: ...
    def predict(
        self, engine: DenseEngine, layer: int, values: Tensor, top_k: int, /
    ) -> list[int]: ...

class HostSlots:
    def __init__(
        self,
        layers: Sequence[SlotLayer],
        transit: Tensor,
        num_held: int,
        num_readers: int,
        piece_bytes: int,
        patience: float,
        /,
    ) -> None: ...
    def hold(self, layer: int, expert: int, /) -> HeldExpert: ...
    def try_hold(self, layer: int, expert: int, /) -> HeldExpert | None: ...
    def take_back(self, layer: int, expert: int, /) -> HeldExpert | None: ...
    def note_on_device(self, states: bytes, /) -> None: ...
    def expect(self, experts: Sequence[Sequence[int]], /) -> None: ...
    def note_likely(self, layer: int, experts: Sequence[int], top_k: int, /) -> None: ...
    def script(self, predicted: Sequence[Sequence[int]], /) -> None: ...
    def run_ahead(self, look_ahead: LookAhead, /) -> None: ...
    def look_always(self) -> None: ...
    def pin(self) -> None: ...
    def require_here(self) -> None: ...
    def fill(self) -> None: ...
    def use_share(self, share: float, /) -> None: ...
    def counts(self) -> SlotCounts: ...
    def is_direct(self) -> bool: ...
    def read_buffered(self) -> None: ...
    def resident(self, layer: int, /) -> list[int]: ...
    def places(self, layer: int, experts: Sequence[int], /) -> bytes: ...
    def fail(self, error: int, every: int, delay_seconds: float, /) -> None: ...

class RowCounts:
    rows: int
    read_bytes: int
    waited_seconds: float

class RowTables:
    def __init__(
        self,
        tables: Sequence[tuple[Sequence[tuple[str, int, int]], int]],
        num_readers: int,
        patience: float,
        /,
    ) -> None: ...
    def read(self, table: int, rows: Tensor, out: Tensor, /) -> None: ...
    def counts(self) -> RowCounts: ...
    def is_direct(self) -> bool: ...
    def close(self) -> None: ...
    def fail(self, error: int, every: int, delay_seconds: float, /) -> None: ...
