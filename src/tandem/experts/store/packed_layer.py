"""A layer's experts in a packed format: one buffer per expert, which the native kernels read.

Checkpoints with activation order (GPTQ's desc_act) sort the inputs of each matrix in an order of
its own. For the second projection, packing puts the first projection's rows into that order; for
the first projection, the order of the expert's inputs is kept in `input_order`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.experts.store.arrivals import WEIGHT_NAMES, Arrivals
from tandem.experts.store.held_expert import Extent, HeldExpert
from tandem.experts.store.layer_slots import LayerSlots
from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.expert import (
    ExpertLayout,
    half_rows,
    halves_of,
    order_inner_rows,
    round_down,
    round_up,
    unpack_expert,
    write_down_bias,
    write_down_codes,
    write_up_bias,
    write_up_codes,
)
from tandem.kernels.formats.file_rows import FileRows, Placing, write_file_rows
from tandem.kernels.formats.native_quantize import Rounding
from tandem.kernels.formats.packed import write_weights
from tandem.kernels.formats.weight_format import (
    FILE_ALIGNMENT_BYTES,
    ExpertFormat,
    WeightFormat,
    aligned,
    formats_of,
)
from tandem.kernels.memory import allocate_buffers
from tandem.kernels.reference import ExpertWeights

STORED_NAME = "experts"
InputImportance = Callable[[str, tuple[int, int]], Tensor | None]
"""Returns a parameter's importance (num_experts, inputs) by its full name, or None if unknown."""
STORED_ORDER_NAME = "input_order"


class PackedLayer:
    """All experts of a layer as one (num_experts, expert bytes) tensor; packed as they arrive.

    In a packed checkpoint each expert begins at a multiple of 4,096 bytes, and a gap follows it.
    """

    def __init__(
        self,
        layer: int,
        arrivals: Arrivals,
        fmt: ExpertFormat,
        *,
        is_transposed: bool,
        is_interleaved: bool,
    ) -> None:
        """Describe a layer; memory is allocated when tensors arrive.

        `is_transposed`: the checkpoint's weights are (inputs, outputs). `is_interleaved`: rows of
        gate and up alternate in its tensors.
        """
        self.layer = layer
        self.arrivals = arrivals
        self.layout = _layout(arrivals, fmt, is_transposed=is_transposed)
        self.is_transposed = is_transposed
        self.input_order: Tensor | None = None
        """Each expert's input index by column: (num_experts, hidden_size); None: natural order."""
        self.slots: LayerSlots | None = None
        """The slots for experts on the disk; None: the buffers hold all experts."""
        self.importance: InputImportance | None = None
        """The importance of inputs for rounding weights; None: all inputs count the same."""
        self._is_interleaved = is_interleaved
        self._stored: Tensor | None = None
        self._buffers: Tensor | None = None
        self._has_up: set[int] = set()
        self._inner_order: dict[int, Tensor] = {}

    @property
    def buffers(self) -> Tensor:
        """The packed experts: (num_experts, layout.num_bytes) uint8, each contiguous."""
        if self._buffers is None:
            size = self.arrivals.num_experts, self.layout.num_bytes
            self._stored = self._buffers = allocate_buffers(*size)
        return self._buffers

    def put(self, tensor_name: str, fused: Tensor) -> None:
        """Pack the fused tensor (num_experts, ...) of one projection or bias."""
        self.arrivals.check_fused(tensor_name, tuple(fused.shape))
        self.put_all(tensor_name, [[tensor] for tensor in fused])

    def put_expert(self, tensor_name: str, expert: int, parts: Sequence[Tensor]) -> None:
        """Pack one expert's tensor, given in parts that are stacked along its first axis."""
        self._put(tensor_name, {expert: parts})

    def put_all(self, tensor_name: str, experts: Sequence[Sequence[Tensor]]) -> None:
        """Pack one projection or bias of all experts at once, on all cores; see `put_expert`."""
        self._put(tensor_name, dict(enumerate(experts)))

    def _put(self, tensor_name: str, experts: Mapping[int, Sequence[Tensor]]) -> None:
        roundings: list[Rounding] = []
        weighed = self._importance_of(tensor_name)
        for expert, parts in experts.items():
            rows = sum(len(part) for part in parts)
            self.arrivals.check_expert(tensor_name, (rows, *parts[0].shape[1:]))
            own = None if weighed is None else weighed[expert]
            roundings += self._roundings(tensor_name, expert, parts, own)
        write_weights(roundings)
        self.arrivals.count(tensor_name, len(experts))

    def _importance_of(self, tensor_name: str) -> Tensor | None:
        if self.importance is None or tensor_name not in WEIGHT_NAMES:
            return None
        layout = self.layout
        width = layout.intermediate_size if tensor_name == "down_proj" else layout.hidden_size
        name = f"{self.arrivals.name}.{tensor_name}"
        return self.importance(name, (self.arrivals.num_experts, width))

    def put_codes(
        self, tensor_name: str, expert: int, coded: CodedMatrix, input_order: Tensor | None = None
    ) -> None:
        """Store one expert's already quantised projection; each row of codes is of one output.

        Column j of the codes belongs to input `input_order[j]`. For the second projection, the
        first projection's rows are put into that order; for the first, `LayerCall` orders the
        inputs.
        """
        rows, cols = coded.codes.shape
        self.arrivals.check_expert(
            tensor_name, (cols, rows) if self.is_transposed else (rows, cols)
        )
        if input_order is not None and len(self.arrivals.shapes) > 2:
            raise ModelError(
                f"{self.arrivals.name} has biases and activation order, which Tandem does not read "
                "together; give an expert_dtype such as int8, to which it is rounded again"
            )
        buffer = self.buffers[expert]
        if tensor_name == "down_proj":
            write_down_codes(self.layout, coded, out=buffer)
            if input_order is not None:
                self._inner_order[expert] = input_order
                if expert in self._has_up:
                    order_inner_rows(self.layout, buffer, input_order)
        else:
            write_up_codes(self.layout, coded, is_interleaved=self._is_interleaved, out=buffer)
            self._has_up.add(expert)
            if expert in self._inner_order:
                order_inner_rows(self.layout, buffer, self._inner_order[expert])
            if input_order is not None:
                self._orders()[expert] = input_order
        self.arrivals.count(tensor_name, 1)

    def put_rows(self, tensor_name: str, experts: Sequence[Sequence[FileRows]]) -> None:
        """Store one projection of all experts from rows of checkpoint files.

        An expert's entry has the rows of gate and of up, or of a single matrix. Raises `ModelError`
        for scales that are not finite; nothing is stored in that case.
        """
        placings: list[Placing] = []
        for expert, parts in enumerate(experts):
            placings += self._placings(tensor_name, expert, parts)
        write_file_rows(placings)
        self.arrivals.count(tensor_name, len(experts))

    def _placings(
        self, tensor_name: str, expert: int, parts: Sequence[FileRows]
    ) -> Iterator[Placing]:
        fmt, layout, buffer = self.format_of(tensor_name), self.layout, self.buffers[expert]
        shape = (sum(part.num_rows for part in parts), parts[0].num_cols)
        self.arrivals.check_expert(tensor_name, shape[::-1] if self.is_transposed else shape)
        if tensor_name == "down_proj":
            targets = [layout.down_blocks(buffer)]
        else:
            targets = [layout.up_half(buffer, half) for half in range(layout.num_halves)]
        name = f"{self.arrivals.name}, expert {expert}: {tensor_name}"
        if len(parts) < len(targets):  # one tensor holds both halves
            halves = (half_rows(layout, half, self._is_interleaved) for half in range(2))
            parts = [parts[0].rows_at(half) for half in halves]
        for target, part in zip(targets, parts, strict=True):
            yield Placing(target, fmt, part, name)

    def format_of(self, tensor_name: str) -> WeightFormat:
        """Return the weight format of a projection."""
        layout = self.layout
        return layout.down_format if tensor_name == "down_proj" else layout.format

    def _orders(self) -> Tensor:
        """Return `input_order`; at the first call, set it to the natural order of every expert."""
        if self.input_order is None:
            in_order = torch.arange(self.layout.hidden_size, dtype=torch.int32, device="cpu")
            self.input_order = in_order.repeat(self.arrivals.num_experts, 1)
        return self.input_order

    def adopt(self, stored_name: str, tensor: Tensor) -> None:
        """Take a tensor of a packed checkpoint: the buffers without a copy, input orders by copy.

        The buffers may be a mapped file. Raises `ModelError` for another name, shape or dtype.
        """
        if stored_name == STORED_ORDER_NAME:
            self._orders().copy_(tensor)
            return
        expected = (self.arrivals.num_experts, aligned(self.layout.num_bytes, FILE_ALIGNMENT_BYTES))
        without_gaps = (self.arrivals.num_experts, self.layout.num_bytes)  # packed formats before 3
        has_shape = tuple(tensor.shape) in (expected, without_gaps)
        if stored_name != STORED_NAME or not has_shape or tensor.dtype != torch.uint8:
            raise ModelError(
                f"{self.arrivals.name} holds {stored_name} of shape {tuple(tensor.shape)} and type "
                f"{tensor.dtype}, expected {STORED_NAME} of shape {expected} in bytes "
                f"in {self.layout.format_name}"
            )
        self._keep(tensor)
        for tensor_name in self.arrivals.shapes:
            self.arrivals.count(tensor_name, self.arrivals.num_experts)

    def move_to(self, stored: dict[str, Tensor]) -> None:
        """Use these tensors from now on; their values must be those that `stored` returned."""
        self._keep(stored[STORED_NAME])
        self.input_order = stored.get(STORED_ORDER_NAME)

    def _keep(self, stored: Tensor) -> None:
        self._stored, self._buffers = stored, stored[:, : self.layout.num_bytes]

    def weights(self, expert: int) -> ExpertWeights:
        """Return one expert's unpacked fp32 weights, [gate; up] and not transposed. Slow."""
        return unpack_expert(self.layout, self.buffers[expert])

    def extents(self, expert: int) -> list[Extent]:
        """Return the extents of an expert in a slot: one extent, its packed bytes."""
        return [Extent(0, self.buffers[expert])]

    def hold(self, expert: int) -> HeldExpert:
        """Return an expert's bytes, from the buffers or a host slot; see `LayerSlots.hold`."""
        return HeldExpert(self.extents(expert)) if self.slots is None else self.slots.hold(expert)

    def try_hold(self, expert: int) -> HeldExpert | None:
        """Hold an expert without waiting for a host slot; None if no slot is free now."""
        return self.hold(expert) if self.slots is None else self.slots.try_hold(expert)

    def take_back(self, expert: int) -> HeldExpert | None:
        """Return a host slot for an expert that a device evicts; see `LayerSlots.take_back`.

        Returns None if the buffers hold all experts.
        """
        return None if self.slots is None else self.slots.take_back(expert)

    def weights_in(self, image: Tensor) -> ExpertWeights:
        """Return the unpacked weights of the expert in a slot. Slow."""
        return unpack_expert(self.layout, image[: self.layout.num_bytes])

    def expected_bytes(self, source_dtype: torch.dtype) -> int:
        """Return the bytes of the packed layer, which do not depend on the source's dtype."""
        return self.num_bytes

    @property
    def image_bytes(self) -> int:
        """Bytes that one expert takes in a slot."""
        return self.layout.num_bytes

    def stored(self) -> dict[str, Tensor]:
        """Return the layer's tensors for a packed checkpoint, by name.

        Experts that came from a packed checkpoint keep the gaps between them.
        """
        order = {} if self.input_order is None else {STORED_ORDER_NAME: self.input_order}
        experts = self.buffers if self._stored is None else self._stored
        return {STORED_NAME: experts, **order}

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer takes in host memory."""
        return self.arrivals.num_experts * self.layout.num_bytes

    def _are_halves(self, tensor_name: str, parts: Sequence[Tensor]) -> bool:
        """Tell whether `parts` are gate and up and can be packed without joining them first."""
        if tensor_name != "gate_up_proj" or self._is_interleaved or self.is_transposed:
            return False
        shape = (self.layout.intermediate_size, self.layout.hidden_size)
        return len(parts) == 2 and all(tuple(part.shape) == shape for part in parts)

    def _roundings(
        self, tensor_name: str, expert: int, parts: Sequence[Tensor], importance: Tensor | None
    ) -> list[Rounding]:
        """Return the rounding jobs that pack an expert's tensor.

        A bias is written at once, and the list is empty.
        """
        name, out = f"{self.arrivals.name}, expert {expert}", self.buffers[expert]
        layout, interleaved = self.layout, self._is_interleaved
        if self._are_halves(tensor_name, parts):
            return round_up(layout, parts, out=out, name=name, importance=importance)
        whole = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        if tensor_name == "down_proj_bias":
            write_down_bias(layout, whole, out=out, name=name)
            return []
        if tensor_name.endswith("_bias"):
            write_up_bias(layout, whole, is_interleaved=interleaved, out=out, name=name)
            return []
        weight = whole.T if self.is_transposed else whole
        if tensor_name == "down_proj":
            return round_down(layout, weight, out=out, name=name, importance=importance)
        halves = halves_of(layout, weight, is_interleaved=interleaved)
        return round_up(layout, halves, out=out, name=name, importance=importance)


def _layout(arrivals: Arrivals, fmt: ExpertFormat, *, is_transposed: bool) -> ExpertLayout:
    _, rows, cols = arrivals.shapes["down_proj"]
    hidden, inner = (cols, rows) if is_transposed else (rows, cols)
    is_gated = arrivals.up_name == "gate_up_proj"
    has_bias = "down_proj_bias" in arrivals.shapes
    up, down = formats_of(fmt)
    return ExpertLayout(up, hidden, inner, is_gated=is_gated, has_bias=has_bias, second_format=down)
