from collections.abc import Callable, Sequence

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
        activation: int,
        alpha: float,
        limit: float,
        offset: float,
        num_experts: int,
        num_tokens: int,
        num_rows: int,
        experts: int,
        row_begin: int,
        row_token: int,
        hidden: int,
        out: int,
        /,
    ) -> None: ...
    def project(
        self,
        layout: ExpertLayout,
        is_up: bool,
        num_experts: int,
        num_tokens: int,
        num_rows: int,
        experts: int,
        row_begin: int,
        row_token: int,
        hidden: int,
        out: int,
        /,
    ) -> None: ...
    def add_rows(
        self,
        num_tokens: int,
        top_k: int,
        size: int,
        rows: int,
        row_of: int,
        weights: int,
        out: int,
        /,
    ) -> None: ...
    def wake(self) -> None: ...
    def bind_workers(self, processors: list[int], /) -> None: ...
    def read_all(self, data: int, num_bytes: int, /) -> int: ...
    def multiply(self, bits: int, count_per_thread: int, /) -> int: ...

def detect_cpu_features() -> CpuFeatures: ...
def available_isas() -> list[str]: ...
def quantize(isa: str, num_threads: int, has_search: bool, count: int, calls: int, /) -> bool: ...
def block_bytes(format: int, /) -> int: ...
def block_cols(format: int, /) -> int: ...
def rearrange_blocks(num_threads: int, count: int, calls: int, /) -> bool: ...
def advise_huge_pages(data: int, num_bytes: int, /) -> bool: ...

class DenseMatrix: ...

def make_dense_matrix(
    format: int, group: int, rows: int, cols: int, data: int, scales: int, bias: int, /
) -> DenseMatrix: ...

class DenseEngine:
    def __init__(self, engine: ExpertEngine, /) -> None: ...
    def run(
        self,
        matrices: tuple[DenseMatrix, ...],
        num_tokens: int,
        in_features: int,
        is_bf16: bool,
        input: int,
        outputs: tuple[int, ...],
        /,
    ) -> None: ...
    def run_groups(
        self,
        matrices: Sequence[DenseMatrix],
        num_tokens: int,
        in_features: int,
        is_bf16: bool,
        input: int,
        token_stride: int,
        group_stride: int,
        out: int,
        /,
    ) -> None: ...
    def read(
        self, matrix: DenseMatrix, cols: int, count: int, numbers: int, is_bf16: bool, out: int, /
    ) -> None: ...

class RoutedLayer:
    def __init__(
        self,
        layout: ExpertLayout,
        activation: int,
        alpha: float,
        limit: float,
        offset: float,
        num_experts: int,
        experts: int,
        expert_bytes: int,
        /,
    ) -> None: ...

class RoutedExperts:
    def __init__(self, engine: ExpertEngine, /) -> None: ...
    def run(
        self,
        layer: RoutedLayer,
        num_tokens: int,
        top_k: int,
        type: int,
        hidden: int,
        index: int,
        weight_type: int,
        weights: int,
        out: int,
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
        sinks: int,
        /,
    ) -> None: ...
    @property
    def key_block_bytes(self) -> int: ...
    @property
    def value_block_bytes(self) -> int: ...
    def set_cache(self, keys: int, values: int, capacity_blocks: int, /) -> None: ...

class AttentionEngine:
    def __init__(self, engine: ExpertEngine, /, may_use_tiles: bool = True) -> None: ...
    def append(
        self,
        layer: AttentionLayer,
        is_bf16: bool,
        num_tokens: int,
        rows: int,
        positions: int,
        key: int,
        key_token_stride: int,
        key_head_stride: int,
        value: int,
        value_token_stride: int,
        value_head_stride: int,
        /,
    ) -> None: ...
    def attend(
        self,
        layer: AttentionLayer,
        is_bf16: bool,
        num_tokens: int,
        rows: int,
        positions: int,
        query: int,
        token_stride: int,
        head_stride: int,
        selected: int,
        num_selected: int,
        out: int,
        /,
    ) -> None: ...

class TokenSampler:
    """`rule` is a `tandem.generate.sampling.SamplingRule`, read once."""

    def __init__(self, isa: str, rule: object) -> None: ...
    def choose(
        self,
        is_bf16: bool,
        logits: int,
        vocabulary: int,
        seen: int,
        num_seen: int,
        uniform: float,
        /,
    ) -> int: ...

class ShortConvolution:
    """A layer's convolution; the caller keeps its tensors alive."""

    def __init__(
        self,
        channels: int,
        width: int,
        weight: int,
        bias: int,
        has_silu: bool,
        states: int,
        /,
    ) -> None: ...
    def keep_drafts(self, kept: int, values: int, /) -> None: ...

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
        factor: int,
        skip: int,
        states: int,
        /,
    ) -> None: ...
    @property
    def logged_values(self) -> int: ...
    def keep_drafts(self, kept: int, values: int, /) -> None: ...

class RecurrentEngine:
    def __init__(self, engine: ExpertEngine, /) -> None: ...

class IndexLayer:
    """The index keys of a layer, wherever they lie now."""

    def __init__(self) -> None: ...
    def set_keys(self, keys: int, capacity: int, dim: int, /) -> None: ...

_Four = tuple[int, int, int, int]
# A tensor: the type of its values, its address, its strides, and a number where that is 0.
_View = tuple[int, int, _Four, float]
# The address of an index, its strides, and the number and distance of the places it chooses from.
_Index = tuple[int, _Four, int, int]

class Program:
    """Tensors are addresses; the caller of `add_*` keeps the tensors, matrices and layers alive."""

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
        num_tokens: int,
        slots: int,
        positions: int,
        have_drafts: bool,
        is_bf16: bool,
        input: int,
        token_stride: int,
        out: int,
        /,
    ) -> None: ...
    def add_recurrence(
        self,
        layer: Recurrence,
        num_tokens: int,
        slots: int,
        positions: int,
        have_drafts: bool,
        is_bf16: bool,
        query: tuple[int, int, int],
        key: tuple[int, int, int],
        value: tuple[int, int, int],
        decay: int,
        rate_is_bf16: bool,
        rate: int,
        out: int,
        /,
    ) -> None: ...
    def add_norm(
        self,
        num_rows: int,
        cols: int,
        eps: float,
        rounds_first: bool,
        is_bf16: bool,
        input: int,
        input_stride: int,
        weight: int,
        weight_rows: int,
        gate_kind: int,
        gate: int,
        gate_stride: int,
        out: int,
        /,
    ) -> None: ...
    def add_rotary(
        self,
        num_tokens: int,
        num_heads: int,
        dim: int,
        rotated: int,
        is_bf16: bool,
        input: int,
        token_stride: int,
        head_stride: int,
        cos: int,
        sin: int,
        out: int,
        /,
    ) -> None: ...
    def add_rotary_pairs(
        self,
        num_tokens: int,
        num_heads: int,
        dim: int,
        is_bf16: bool,
        input: int,
        token_stride: int,
        head_stride: int,
        turns: int,
        out: int,
        /,
    ) -> None: ...
    def add_choice(
        self,
        num_tokens: int,
        num_experts: int,
        top_k: int,
        is_normalised: bool,
        scale: float,
        is_bf16: bool,
        logits: int,
        weights_are_bf16: bool,
        weights: int,
        index: int,
        /,
    ) -> None: ...
    def add_ranked_choice(
        self,
        num_tokens: int,
        num_experts: int,
        top_k: int,
        groups: int,
        kept_groups: int,
        best_of_group: int,
        is_normalised: bool,
        epsilon: float,
        scale: float,
        scores_are_bf16: bool,
        scores: int,
        ranks: int,
        weights_are_bf16: bool,
        weights: int,
        index: int,
        /,
    ) -> None: ...
    def add_elementwise(
        self, kind: int, sizes: _Four, a: _View, b: _View, c: _View, out: _View, /
    ) -> None: ...
    def add_reduction(
        self, kind: int, sizes: _Four, x: _View, out: tuple[int, int], index: int, /
    ) -> None: ...
    def add_softmax(self, sizes: _Four, x: _View, out: tuple[int, int], /) -> None: ...
    def add_layer_norm(
        self,
        sizes: _Four,
        x: _View,
        eps: float,
        weight: int,
        bias: int,
        out: tuple[int, int],
        /,
    ) -> None: ...
    def add_greatest(
        self, sizes: _Four, x: _View, top_k: int, out: tuple[int, int], index: int, /
    ) -> None: ...
    def add_lookup(
        self, sizes: _Four, x: _View, index: _Index, out: tuple[int, int], /
    ) -> None: ...
    def add_scatter(self, sizes: _Four, x: _View, index: _Index, out: _View, /) -> None: ...
    def add_product(self, sizes: _Four, depth: int, a: _View, b: _View, out: _View, /) -> None: ...
    def add_selection(
        self,
        layer: IndexLayer,
        num_tokens: int,
        slots: int,
        positions: int,
        num_heads: int,
        most: int,
        scale: float,
        key: _View,
        query: _View,
        weights: _View,
        out: int,
        /,
    ) -> None: ...
    def add_dense(
        self,
        matrices: Sequence[DenseMatrix],
        num_tokens: int,
        in_features: int,
        is_bf16: bool,
        input: int,
        outputs: Sequence[int],
        /,
    ) -> None: ...
    def add_groups(
        self,
        matrices: Sequence[DenseMatrix],
        num_tokens: int,
        in_features: int,
        is_bf16: bool,
        input: int,
        token_stride: int,
        group_stride: int,
        out: int,
        /,
    ) -> None: ...
    def add_rows(
        self, matrix: DenseMatrix, cols: int, count: int, numbers: int, is_bf16: bool, out: int, /
    ) -> None: ...
    def add_attention(
        self,
        layer: AttentionLayer,
        is_bf16: bool,
        num_tokens: int,
        rows: int,
        positions: int,
        query: int,
        query_token_stride: int,
        query_head_stride: int,
        key: int,
        key_token_stride: int,
        key_head_stride: int,
        value: int,
        value_token_stride: int,
        value_head_stride: int,
        selected: int,
        num_selected: int,
        out: int,
        /,
    ) -> None: ...
    def add_experts(
        self,
        layer: RoutedLayer,
        num_tokens: int,
        top_k: int,
        type: int,
        hidden: int,
        index: int,
        weight_type: int,
        weights: int,
        out: int,
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
        num_tokens: int,
        row_token: int,
        num_rows: int,
        hidden: int,
        out: int,
        /,
    ) -> None: ...
    def finish(self) -> None: ...

class SuccessorTable:
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

class ForesightTables:
    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        first_row: int,
        num_buckets: int,
        rate: float,
        token_rate: float,
        /,
    ) -> None: ...
    def begin_step(self, tokens: Sequence[int], /) -> None: ...
    def scores(self, layer: int, above: Sequence[int], before: Sequence[int], /) -> bytes: ...
    def teach(
        self,
        layer: int,
        experts: Sequence[int],
        tokens: Sequence[int],
        above: Sequence[int],
        before: Sequence[int],
        /,
    ) -> None: ...

class LoneTerms:
    def __init__(
        self,
        cpu: float,
        gpu: float,
        cpu_first: float,
        link: float,
        cpu_slowdown: float,
        link_slowdown: float,
        max_fetches: int,
        never_worse_than_cpu: bool,
        /,
    ) -> None: ...

def decide_lone_layer(
    terms: LoneTerms,
    experts: Sequence[int],
    states: bytes | bytearray,
    worth: memoryview,
    first: int,
    members: Sequence[int],
    free_slots: int,
    all_on_cpu: float,
    now: float,
    dense: float,
    link_busy: float,
    /,
) -> tuple[list[int], list[int], float, float, list[tuple[int, int]]]: ...

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
    def layer_bytes(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def results(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

_Resident = tuple[bytes, list[int], list[list[int]], list[list[int]]]
_SlotCopy = tuple[int, int, int, int]  # layer, expert, slot, victim or -1
_Arrival = tuple[int, int, float]  # layer, expert, seconds

class StepPolicy:
    def __init__(
        self,
        cpu: Sequence[float],
        gpu: Sequence[float],
        cpu_first: float,
        link: float,
        tables: list[SuccessorTable],
        state: bytes,
        slot_of: Sequence[int],
        members: Sequence[Sequence[int]],
        free: Sequence[Sequence[int]],
        /,
    ) -> None: ...
    def load(
        self,
        state: bytes,
        slot_of: Sequence[int],
        members: Sequence[Sequence[int]],
        free: Sequence[Sequence[int]],
        link_free_at: float,
        /,
    ) -> None: ...
    def resident(self) -> _Resident: ...
    def link_free_at(self) -> float: ...
    def begin_step(self, dense_seconds: float, /) -> None: ...
    def decide(
        self, layer: int, experts: Sequence[int], tokens: Sequence[int], now: float, /
    ) -> list[_SlotCopy]: ...
    def copy_finished(self, layer: int, expert: int, now: float, /) -> None: ...
    def learn(self, layer: int, /) -> None: ...

class StepLostError(RuntimeError): ...

class DriverLink:
    def __init__(self, library: str, table: int, /) -> None: ...

class StepCoordinator:
    def __init__(self, layers: Sequence[RoutedLayer], num_threads: int, isa: str, /) -> None: ...
    def close(self) -> None: ...
    def set_hook(self, hook: Callable[[int], None] | None, /) -> None: ...
    def add_mailbox(self, num_rows: int, top_k: int, type: int, memory: int = 0, /) -> int: ...
    def begin_step(self, number: int, patience: float, /) -> None: ...
    def finish_step(self, patience: float, /) -> None: ...
    def abort_step(self, patience: float, /) -> bool: ...
    def records(
        self,
    ) -> list[tuple[int, list[int], list[int], list[float], int, float, float, float, float]]: ...
    def manage_slots(
        self,
        entries: int,
        num_experts: int,
        slots: Sequence[int],
        policy: StepPolicy | None,
        bytes_per_second: float,
        before_copy: Callable[[], None] | None,
        link: DriverLink | None = None,
        /,
    ) -> None: ...
    def set_dense_seconds(self, seconds: float, /) -> None: ...
    def take_decided(self) -> list[tuple[int, float, list[_Arrival], list[_SlotCopy]]]: ...
    def submit(self, copies: Sequence[_SlotCopy], /) -> None: ...
    def clear_entries(self) -> None: ...
    def begin_copies(self) -> None: ...
    def take_arrivals(self) -> list[_Arrival]: ...
    def drain_copies(self) -> None: ...
    def copy_error(self) -> str: ...

_TwinCall = tuple[int, int, int, int, int, int, int]

class TwinStream:
    def __init__(
        self,
        coordinator: StepCoordinator,
        mailbox: int,
        addresses: int,
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
    def times(self) -> list[tuple[float, float]]: ...
    def join(self) -> None: ...
