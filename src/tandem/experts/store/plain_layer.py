"""A layer's experts as plain torch tensors (bf16, fp16, fp32), which the torch reference reads."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.experts.store.arrivals import Arrivals, is_finite
from tandem.experts.store.held_expert import Extent, HeldExpert
from tandem.kernels.formats.weight_format import SECTION_ALIGNMENT_BYTES, aligned
from tandem.kernels.reference import ExpertWeights


class PlainLayer:
    """A layer's experts: a tensor (num_experts, ...) per projection and bias, as in the source."""

    def __init__(
        self, layer: int, arrivals: Arrivals, *, is_transposed: bool, dtype: torch.dtype | None
    ) -> None:
        """Describe a layer; memory is allocated when tensors arrive.

        `dtype` None keeps the source's dtype.
        """
        self.layer = layer
        self.arrivals = arrivals
        self.is_transposed = is_transposed
        """Whether weights are (inputs, outputs)."""
        self.input_order: Tensor | None = None
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}

    def put(self, tensor_name: str, fused: Tensor) -> None:
        """Store the fused tensor (num_experts, ...) of one projection or bias."""
        self.arrivals.check_fused(tensor_name, tuple(fused.shape))
        self._require_finite(tensor_name, fused)
        self._allocate(tensor_name, fused.dtype).copy_(fused)
        self.arrivals.count(tensor_name, self.arrivals.num_experts)

    def put_expert(self, tensor_name: str, expert: int, parts: Sequence[Tensor]) -> None:
        """Store one expert's tensor, given in parts that are stacked along its first axis."""
        rows = sum(part.shape[0] for part in parts)
        self.arrivals.check_expert(tensor_name, (rows, *parts[0].shape[1:]))
        target = self._allocate(tensor_name, parts[0].dtype)[expert]
        start = 0
        for part in parts:
            self._require_finite(tensor_name, part)
            target[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        self.arrivals.count(tensor_name, 1)

    def _require_finite(self, tensor_name: str, values: Tensor) -> None:
        if not is_finite(values):
            raise ModelError(
                f"{self.arrivals.name}.{tensor_name} has weights that are NaN or infinite, "
                "expected finite ones; the checkpoint is damaged: download it again"
            )

    def adopt(self, stored_name: str, tensor: Tensor) -> None:
        """Keep a tensor of a packed checkpoint; it may be a view of a mapped file.

        A tensor that is not aligned in its file is copied, because slots are aligned, and torch's
        products differ in the last bit with the alignment of their operands.
        """
        self.arrivals.check_fused(stored_name, tuple(tensor.shape))
        is_unaligned = tensor.data_ptr() % SECTION_ALIGNMENT_BYTES != 0
        self._tensors[stored_name] = tensor.clone() if is_unaligned else tensor
        self.arrivals.count(stored_name, self.arrivals.num_experts)

    def move_to(self, stored: dict[str, Tensor]) -> None:
        """Use these tensors from now on; their values must be those that `stored` returned."""
        self._tensors = dict(stored)

    def weights(self, expert: int) -> ExpertWeights:
        """Return views of one expert's tensors."""
        return self._as_weights({name: tensor[expert] for name, tensor in self._tensors.items()})

    def extents(self, expert: int) -> list[Extent]:
        """Return the extents of an expert in a slot: its tensors, one after another."""
        offsets = self._offsets()
        return [
            Extent(offsets[name], tensor[expert].reshape(-1).view(torch.uint8))
            for name, tensor in self._tensors.items()
        ]

    def hold(self, expert: int) -> HeldExpert:
        """Return an expert's bytes, which are in memory permanently."""
        return HeldExpert(self.extents(expert))

    try_hold = hold

    def take_back(self, expert: int) -> None:
        """Return None: host memory already has the expert."""

    def weights_in(self, image: Tensor) -> ExpertWeights:
        """Return views of the tensors that a slot holds."""
        offsets = self._offsets()
        found = {}
        for name, tensor in self._tensors.items():
            section = image[offsets[name] : offsets[name] + tensor[0].nbytes]
            found[name] = section.view(tensor.dtype).view(tensor.shape[1:])
        return self._as_weights(found)

    def expected_bytes(self, source_dtype: torch.dtype) -> int:
        """Return the bytes that all tensors will take, in the layer's dtype or `source_dtype`."""
        size = (self._dtype or source_dtype).itemsize
        return sum(math.prod(shape) * size for shape in self.arrivals.shapes.values())

    @property
    def image_bytes(self) -> int:
        """Bytes that one expert takes in a slot."""
        return sum(aligned(tensor[0].nbytes) for tensor in self._tensors.values())

    def stored(self) -> dict[str, Tensor]:
        """Return the layer's tensors for a packed checkpoint, by name."""
        return dict(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer takes in host memory."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _as_weights(self, tensors: dict[str, Tensor]) -> ExpertWeights:
        up = self.arrivals.up_name
        return ExpertWeights(
            up=tensors[up],
            down=tensors["down_proj"],
            up_bias=tensors.get(f"{up}_bias"),
            down_bias=tensors.get("down_proj_bias"),
            is_transposed=self.is_transposed,
        )

    def _offsets(self) -> dict[str, int]:
        offsets, offset = {}, 0
        for name, tensor in self._tensors.items():
            offsets[name] = offset
            offset += aligned(tensor[0].nbytes)
        return offsets

    def _allocate(self, tensor_name: str, source_dtype: torch.dtype) -> Tensor:
        if tensor_name not in self._tensors:
            shape, dtype = self.arrivals.shapes[tensor_name], self._dtype or source_dtype
            self._tensors[tensor_name] = torch.empty(shape, dtype=dtype, device="cpu")
        return self._tensors[tensor_name]
