"""Routers that look a token's experts up in a table: what they choose is known with the token.

A loaded model and one without weights, whose speed is forecast, are asked alike.
"""

from torch import Tensor, nn

from tandem.hf.experts import Bound

TABLE = "tid2eid"
"""Of a router, as Transformers calls it: (vocabulary, experts of a token)."""


def is_by_token(router: nn.Module) -> bool:
    """Tell whether a router has a table, so that no state decides what it chooses."""
    return hasattr(router, TABLE)


def tables_by_token(model: nn.Module, bound: Bound) -> list[tuple[int, Tensor]]:
    """Return the layers that are routed by token, in their order, each with its table.

    `bound` are the model's experts modules, a router's being beside it.
    """
    layers, found = dict(bound), list[tuple[int, Tensor]]()
    for block in model.modules():
        children = list(block.children())
        tables = [one.get_buffer(TABLE) for one in children if is_by_token(one)]
        numbers = [layers[one] for one in children if one in layers]
        found += zip(numbers, tables, strict=False)
    return sorted(found, key=lambda each: each[0])
