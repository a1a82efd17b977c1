"""Grouped linear layers: each group of rows has its own input (DeepSeek-V4's output projection).

The packed weight is a single matrix, as in other layers; its groups are multiplied separately.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor, nn

from tandem.kernels.dense import CpuThreads, DenseWeight, multiply_groups
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK
from tandem.kernels.opaque_calls import GROUPS, opaque


class _CanBeCut(Protocol):
    def cut(self, num_groups: int) -> None:
        """Split the rows into groups, each with an input of its own."""


def num_groups_of(linear: object) -> int:
    """Return how many groups a linear layer has; 1 for an ordinary one."""
    return int(vars(linear).get("n_groups", 1))


def is_grouped(module: nn.Module) -> bool:
    """Tell whether a module is a grouped linear layer that the CPU's kernels can compute.

    Such a layer has no bias, and its groups are whole blocks of rows.
    """
    if not (isinstance(module, nn.Linear) and type(module).__name__.endswith("GroupedLinear")):
        return False
    num_groups = num_groups_of(module)
    is_in_blocks = module.out_features // num_groups % ROWS_PER_BLOCK == 0
    return num_groups > 1 and module.bias is None and is_in_blocks


def cut_like(linear: object, packed: nn.Module) -> nn.Module:
    """Return `packed`, the packed form of `linear`; split it into groups if `linear` has them."""
    if (num_groups := num_groups_of(linear)) > 1:
        cast("_CanBeCut", packed).cut(num_groups)
    return packed


def multiply_by_group(threads: CpuThreads, groups: Sequence[DenseWeight], x: Tensor) -> Tensor:
    """Return each group's product on the CPU: (..., groups, in_features) -> (..., groups, out)."""
    out = opaque(GROUPS, multiply_groups, threads, groups, x.flatten(0, -3))
    return out.view(*x.shape[:-1], -1)
