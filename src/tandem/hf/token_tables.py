"""Finds routers that look up a token's experts in a table: the token id decides the choice.

Works on loaded models and, for forecasts, on models on the meta device.
"""

from torch import Tensor, nn

from tandem.hf.experts import Bound

TABLE = "tid2eid"
"""Transformers' name for a router's table of shape (vocabulary, experts of a token)."""


def is_by_token(router: nn.Module) -> bool:
    """Tell whether a router chooses by the token id alone, which it looks up in a table."""
    return hasattr(router, TABLE)


def tables_by_token(model: nn.Module, bound: Bound) -> list[tuple[int, Tensor]]:
    """Return the layers that are routed by token id, in order, each with its table.

    `bound` lists the model's experts modules. A router must be a sibling of its experts module.
    """
    layers, found = dict(bound), list[tuple[int, Tensor]]()
    for block in model.modules():
        children = list(block.children())
        tables = [one.get_buffer(TABLE) for one in children if is_by_token(one)]
        numbers = [layers[one] for one in children if one in layers]
        found += zip(numbers, tables, strict=False)
    return sorted(found, key=lambda each: each[0])
