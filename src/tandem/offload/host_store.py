"""The experts of a model, once, in host memory. Knows bytes; neither files nor routing.

One `HostLayer` per MoE layer. A layer is allocated when its first tensor arrives, filled expert by
expert while the checkpoint streams in, and only read afterwards.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels.reference import ExpertWeights

# The tensors of a fused experts module: with a gate or without, weights and biases.
UP_NAMES = ("gate_up_proj", "up_proj")
WEIGHT_NAMES = (*UP_NAMES, "down_proj")
TENSOR_NAMES = (*WEIGHT_NAMES, *(f"{name}_bias" for name in WEIGHT_NAMES))


class HostLayer:
    """All routed experts of a MoE layer: a tensor (num_experts, ...) per projection and bias."""

    def __init__(
        self,
        layer: int,
        name: str,
        shapes: dict[str, tuple[int, ...]],
        *,
        is_transposed: bool,
        dtype: torch.dtype | None,
    ) -> None:
        """Describe a layer by its fused tensors' shapes; `dtype` None keeps the source's."""
        self.layer = layer
        self.name = name
        self.shapes = shapes
        self.num_experts = next(iter(shapes.values()))[0]
        self.is_transposed = is_transposed
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}
        self._num_filled = dict.fromkeys(shapes, 0)

    def put(self, tensor_name: str, fused: Tensor) -> None:
        """Take the fused tensor (num_experts, ...) of one projection."""
        self._check_shape(tensor_name, tuple(fused.shape))
        target = self._allocate(tensor_name, fused.dtype)
        target.copy_(fused)
        self._num_filled[tensor_name] = self.num_experts

    def put_expert(self, tensor_name: str, expert: int, parts: Sequence[Tensor]) -> None:
        """Take one expert's tensor, given in parts that are stacked along its first axis."""
        rows = sum(part.shape[0] for part in parts)
        self._check_shape(tensor_name, (self.num_experts, rows, *parts[0].shape[1:]))
        target = self._allocate(tensor_name, parts[0].dtype)[expert]
        start = 0
        for part in parts:
            target[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        self._num_filled[tensor_name] += 1

    def adopt(self, tensor_name: str, fused: Tensor) -> None:
        """Keep a packed tensor as it is, without a copy (it may be a view of a mapped file)."""
        self._check_shape(tensor_name, tuple(fused.shape))
        self._tensors[tensor_name] = fused
        self._num_filled[tensor_name] = self.num_experts

    def weights(self, expert: int) -> ExpertWeights:
        """Return views of one expert's tensors."""
        up = next(name for name in UP_NAMES if name in self._tensors)
        return ExpertWeights(
            up=self._tensors[up][expert],
            down=self._tensors["down_proj"][expert],
            up_bias=self._bias(up, expert),
            down_bias=self._bias("down_proj", expert),
            is_transposed=self.is_transposed,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the fused tensors by name, for saving."""
        return dict(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer's tensors take in host memory."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.num_bytes // self.num_experts

    def require_complete(self) -> None:
        """Raise `ModelError` naming the first tensor of which experts are missing."""
        for tensor_name, filled in self._num_filled.items():
            if filled != self.num_experts:
                raise ModelError(
                    f"the checkpoint has {filled} of {self.num_experts} experts of "
                    f"{self.name}.{tensor_name}; download the missing files again"
                )

    def _bias(self, tensor_name: str, expert: int) -> Tensor | None:
        bias = self._tensors.get(f"{tensor_name}_bias")
        return None if bias is None else bias[expert]

    def _allocate(self, tensor_name: str, source_dtype: torch.dtype) -> Tensor:
        if tensor_name not in self._tensors:
            dtype = self._dtype or source_dtype
            self._tensors[tensor_name] = torch.empty(self.shapes[tensor_name], dtype=dtype)
        return self._tensors[tensor_name]

    def _check_shape(self, tensor_name: str, found: tuple[int, ...]) -> None:
        expected = self.shapes[tensor_name]
        if found != expected:
            raise ModelError(
                f"{self.name}.{tensor_name} has shape {found}, but config.json asks for "
                f"{expected}; use the config.json that belongs to these weights"
            )


class HostStore:
    """Every MoE layer's experts, in the order in which the model runs the layers."""

    def __init__(self) -> None:
        self._layers: list[HostLayer] = []

    def add_layer(
        self,
        name: str,
        shapes: dict[str, tuple[int, ...]],
        *,
        is_transposed: bool,
        dtype: torch.dtype | None,
    ) -> HostLayer:
        """Announce the next MoE layer; its memory is taken when its tensors arrive."""
        layer = HostLayer(len(self._layers), name, shapes, is_transposed=is_transposed, dtype=dtype)
        self._layers.append(layer)
        return layer

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[HostLayer]:
        return iter(self._layers)

    def __getitem__(self, layer: int) -> HostLayer:
        return self._layers[layer]

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts in host memory."""
        return sum(layer.num_bytes for layer in self._layers)
