"""Finds the linear layers of routers: modules beside experts that end in one score per expert.

Works by shapes, so that a model's weights need not be loaded; `tests/hf/test_architectures.py`
compares the result with what the weights of the chosen experts depend on.
"""

from torch import nn

from tandem.foreign_types import ModelPart
from tandem.hf.experts import is_experts_module, num_spare_experts


def router_layers(model: nn.Module) -> set[nn.Module]:
    """Return all linear layers of a model's routers.

    A router is in the smallest block around its experts that contains a router. Blocks that also
    contain other experts are not searched.
    """
    modules = dict(model.named_modules())
    experts = {path: module for path, module in modules.items() if is_experts_module(module)}
    found: set[nn.Module] = set()
    for path, module in experts.items():
        block = path
        while block := block.rpartition(".")[0]:
            if sum(other.startswith(f"{block}.") for other in experts) > 1:
                break  # the block contains several layers
            routers = [part for part in modules[block].children() if _scores(part, module)]
            if routers:
                inner = (layer for router in routers for layer in router.modules())
                found.update(layer for layer in inner if isinstance(layer, nn.Linear))
                break
    return found


def _scores(part: nn.Module, experts: ModelPart) -> bool:
    """Whether the last matrix of a block's part has one row per expert, as a router's has.

    The matrix may have further rows: for experts without weights, or for the choice of no expert
    (ZAYA).
    """
    count = getattr(experts, "num_experts", None) or len(experts.down_proj)
    spare = num_spare_experts(experts) or 1
    matrices = [parameter for parameter in part.parameters() if parameter.dim() == 2]
    return bool(matrices) and count <= len(matrices[-1]) <= count + spare
