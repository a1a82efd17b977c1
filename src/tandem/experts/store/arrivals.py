"""Checks a layer's tensors as they arrive from a checkpoint: shapes, finiteness, completeness."""

import math

import torch
from torch import Tensor

from tandem.core.errors import ModelError

# Names of a fused experts module's tensors: with or without a gate, weights and biases.
UP_NAMES = ("gate_up_proj", "up_proj")
WEIGHT_NAMES = (*UP_NAMES, "down_proj")
TENSOR_NAMES = (*WEIGHT_NAMES, *(f"{name}_bias" for name in WEIGHT_NAMES))


class Arrivals:
    """Checks the shapes of one MoE layer's tensors, and counts the experts that have arrived."""

    def __init__(self, name: str, shapes: dict[str, tuple[int, ...]], num_spare: int = 0) -> None:
        """Expect the fused tensors (num_experts, ...) of the layer `name`, with these `shapes`.

        The checkpoint may have tensors of `num_spare` more experts, which are never read.
        """
        self.name = name
        self.num_spare = num_spare
        self.shapes = shapes
        self.num_experts = next(iter(shapes.values()))[0]
        self._num_filled = dict.fromkeys(shapes, 0)

    @property
    def up_name(self) -> str:
        """The name of the first projection's tensor: one of `UP_NAMES`."""
        return next(name for name in UP_NAMES if name in self.shapes)

    def check_fused(self, tensor_name: str, shape: tuple[int, ...]) -> None:
        """Raise `ModelError` if a fused tensor's shape differs from the config's."""
        expected = self.shapes[tensor_name]
        if shape != expected:
            raise ModelError(
                f"{self.name}.{tensor_name} has shape {shape}, but config.json asks for "
                f"{expected}; use the config.json that belongs to these weights"
            )

    def check_expert(self, tensor_name: str, shape: tuple[int, ...]) -> None:
        """Raise `ModelError` if the shape of one expert's tensor differs from the config's."""
        self.check_fused(tensor_name, (self.num_experts, *shape))

    def count(self, tensor_name: str, num_experts: int) -> None:
        """Record that `num_experts` more experts of a tensor have been stored."""
        self._num_filled[tensor_name] += num_experts

    @property
    def is_complete(self) -> bool:
        """Whether all experts of all tensors have been stored."""
        return all(filled >= self.num_experts for filled in self._num_filled.values())

    def require_complete(self) -> None:
        """Raise `ModelError` naming the first tensor with missing experts."""
        for tensor_name, filled in self._num_filled.items():
            if filled < self.num_experts:
                raise ModelError(
                    f"the checkpoint has {filled} of {self.num_experts} experts of "
                    f"{self.name}.{tensor_name}; download the missing files again"
                )


def is_finite(tensor: Tensor) -> bool:
    """Tell whether all values are finite; for a tensor on a GPU, wait for the answer."""
    if tensor.numel() == 0:
        return True
    values = tensor.detach()
    if values.element_size() == 1:  # torch does not compare fp8
        values = values.float()
    # min and max propagate NaN. On bf16 this checks 5 GB/s per core; `isfinite` checks 0.1, a sum
    # in fp32 0.3.
    low, high = torch.aminmax(values)
    return math.isfinite(float(low) + float(high))
