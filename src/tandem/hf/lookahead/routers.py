"""Finds a model's routers by observing one tiny forward pass; knows no architecture.

A router is the submodule, near the experts, that returned the choice which the experts received. It
can be run again on another hidden state if each of its other inputs is stored in the model, is the
step's token ids, or is not a tensor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.foreign_types import PreTrainedModel
from tandem.hf.experts import Bound
from tandem.hf.lookahead.warm_up import WARM_UP_TOKENS, forward_tokens, warm_up_ids

TOKEN_IDS = object()  # placeholder among a router's arguments for the ids of the step's tokens


class Router(NamedTuple):
    """A router that can be run on another layer's hidden state."""

    module: nn.Module
    rest: tuple[object, ...]
    """The arguments after the hidden state; TOKEN_IDS stands for the ids of a step's tokens."""
    options: dict[str, object]
    place: int
    """The index of the choice among the router's outputs."""
    hidden_size: int

    @property
    def reads_tokens(self) -> bool:
        """Whether the router reads the step's token ids."""
        return any(part is TOKEN_IDS for part in (*self.rest, *self.options.values()))

    def token_ids(self, args: Sequence[object], options: dict[str, object]) -> Tensor | None:
        """Return the token ids among the arguments of a router's call; None if there are none."""
        arguments = [*zip(self.rest, args[1:], strict=False)]
        arguments += [(part, options.get(name)) for name, part in self.options.items()]
        return next(
            (x for part, x in arguments if part is TOKEN_IDS and isinstance(x, Tensor)), None
        )

    def choose(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return the experts (n_tokens, top_k) that the router chooses for a hidden state.

        Calls `forward`, so that no hook of the module runs.
        """
        rest = [token_ids if part is TOKEN_IDS else part for part in self.rest]
        options = {k: token_ids if v is TOKEN_IDS else v for k, v in self.options.items()}
        outputs = self.module.forward(hidden, *rest, **options)
        choice: Tensor = outputs[self.place] if isinstance(outputs, tuple | list) else outputs
        return choice.reshape(-1, choice.shape[-1])


class _Call(NamedTuple):
    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, object]
    outputs: Sequence[object]


def find_routers(
    model: PreTrainedModel, bound: Bound, *, num_tokens: int = WARM_UP_TOKENS
) -> list[Router] | str:
    """Return each layer's router in the store's order, or a sentence that says why that fails."""
    names = {module: name for name, module in model.named_modules()}
    experts = {names[module]: layer for module, layer in bound}
    with _watch(experts, names) as (calls, choices):
        try:
            forward_tokens(model, num_tokens)
        except Exception as error:  # a model's own code may raise anything
            return f"the model does not run on text alone ({error})"
    ids = warm_up_ids(model, num_tokens)
    stored = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    routers: dict[int, Router] = {}
    for name, layer in experts.items():
        if name not in choices:
            return f"{name} was not used for a text"
        call = _nearest(calls, name, experts, names, choices[name])
        if call is None:
            return f"no module returned what {name} received"
        if not call.args or not _is_replayable(call, stored, ids):
            return f"the router of {name} takes more than a hidden state"
        outputs = [_matches(output, choices[name]) for output in call.outputs]
        rest = tuple(_kept(part, ids) for part in call.args[1:])
        options = {key: _kept(part, ids) for key, part in call.options.items()}
        width, place = call.args[0].shape[-1], outputs.index(True)
        routers[layer] = Router(call.module, rest, options, place, width)
    return [routers[layer] for layer in sorted(routers)]


@contextmanager
def _watch(
    experts: dict[str, int], names: dict[nn.Module, str]
) -> Iterator[tuple[list[_Call], dict[str, Tensor]]]:
    """Yield two collections that forward passes inside the context fill.

    They are the calls of modules whose outputs include integers, and the first
    choice that each experts module received, by the module's name.
    """
    calls: list[_Call] = []
    choices: dict[str, Tensor] = {}

    def returned(
        module: nn.Module, args: tuple[Any, ...], options: dict[str, object], outputs: object
    ) -> None:
        parts = outputs if isinstance(outputs, tuple | list) else (outputs,)
        if any(isinstance(part, Tensor) and not part.is_floating_point() for part in parts):
            calls.append(_Call(module, args, options, parts))

    def received(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
        choice = args[1] if len(args) > 1 else options["top_k_index"]
        choices.setdefault(names[module], choice.detach().clone())

    handles = [
        module.register_forward_pre_hook(received, with_kwargs=True)
        if name in experts
        else module.register_forward_hook(returned, with_kwargs=True)
        for module, name in names.items()
    ]
    try:
        yield calls, choices
    finally:
        for handle in handles:
            handle.remove()


def _nearest(
    calls: Sequence[_Call],
    name: str,
    experts: dict[str, int],
    names: dict[nn.Module, str],
    choice: Tensor,
) -> _Call | None:
    """Return the call that returned `choice`, nearest to the experts module `name`; None: no call.

    Larger and larger blocks around the module are searched, until one contains other experts.
    """
    block = name
    while block:
        block = block.rpartition(".")[0]
        if sum(other.startswith(f"{block}.") for other in experts) > 1:
            return None
        found = [
            call
            for call in calls
            if names[call.module].startswith(f"{block}.")
            and any(_matches(output, choice) for output in call.outputs)
        ]
        if found:
            return min(found, key=lambda call: len(list(call.module.modules())))
    return None


def _matches(output: object, choice: Tensor) -> bool:
    if not isinstance(output, Tensor) or output.is_floating_point():
        return False
    return output.numel() == choice.numel() and torch.equal(
        output.reshape(choice.shape).long(), choice.long()
    )


def _is_replayable(call: _Call, stored: set[int], ids: Tensor) -> bool:
    """Tell whether each input but the hidden state is stored, is token ids, or is not a tensor."""
    rest = (*call.args[1:], *call.options.values())
    is_hidden = isinstance(call.args[0], Tensor) and call.args[0].is_floating_point()
    return is_hidden and all(
        part.data_ptr() in stored or _matches(part, ids)
        for part in rest
        if isinstance(part, Tensor)
    )


def _kept(part: object, ids: Tensor) -> object:
    """Return an argument as a `Router` stores it: token ids become `TOKEN_IDS`."""
    return TOKEN_IDS if _matches(part, ids) else part
