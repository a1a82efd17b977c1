"""Collects the mean squares of the inputs of every matrix while a model reads a text.

Experts are computed in torch, one after another, so that the values between their projections can
be read. Windows of one length are batched, so that each expert is unpacked once for many tokens.
The head is left out: each of its rows matters for tokens after which its word is likely, and a mean
over all tokens does not show that. The collection needs memory for the model and for one batch's
values.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tandem.checkpoint.input_squares import InputSquares
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.reference_executor import ReferenceExecutor
from tandem.experts.store.host_store import HostLayer, HostStore
from tandem.foreign_types import PreTrainedModel
from tandem.hf.compat import takes_logits_to_keep
from tandem.hf.dense import packable_layers, packed_layers
from tandem.hf.runtime import require_runtime
from tandem.quality.texts import Window

_TOKENS_AT_ONCE = 2048

Progress = Callable[[int, int], None]  # (tokens done, total)


class Squares:
    """Sums of squares of the inputs of one or more matrices, with the number of tokens of each."""

    def __init__(self, num_matrices: int, width: int) -> None:
        """Start with zero tokens, for `num_matrices` matrices with `width` inputs each."""
        self._sums = torch.zeros(num_matrices, width, dtype=torch.float64, device="cpu")
        self._tokens = torch.zeros(num_matrices, dtype=torch.int64, device="cpu")

    def add(self, inputs: Tensor, matrix: int = 0) -> None:
        """Add the inputs of tokens, (n_tokens, width), to a matrix's sums."""
        self._sums[matrix] += inputs.float().square().sum(0).cpu()
        self._tokens[matrix] += len(inputs)

    def mean(self) -> InputSquares:
        """Return the mean square of each input of each matrix, with the numbers of tokens."""
        tokens = self._tokens.clamp(min=1)[:, None]
        return InputSquares((self._sums / tokens).float(), self._tokens)


class CollectingExecutor(ReferenceExecutor):
    """Computes experts, and sums up the squares of the inputs of both projections."""

    def __init__(self, store: HostStore) -> None:
        """Start without sums, for the experts of `store`."""
        super().__init__(store)
        self.found: dict[str, Squares] = {}
        """Sums of squares of inputs, by the parameter name of a projection of a layer's experts."""

    def rows(
        self, host: HostLayer, expert: int, rows: Tensor, functions: ExpertFunctions
    ) -> Tensor:
        """Compute one expert, and add its inputs' squares to the sums of both projections.

        Input and result are (n_tokens, hidden_size) fp32.
        """
        self._of(host, host.arrivals.up_name, rows.shape[1]).add(rows, expert)

        def noted(activate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def call(up: Tensor) -> Tensor:
                inner = activate(up)
                self._of(host, "down_proj", inner.shape[1]).add(inner, expert)
                return inner

            return call

        unpacked = functions.unpacked_activate
        seen = ExpertFunctions(
            noted(functions.activate), functions.post_norm,
            unpacked_activate=None if unpacked is None else noted(unpacked),
        )  # fmt: skip
        return super().rows(host, expert, rows, seen)

    def _of(self, host: HostLayer, tensor_name: str, width: int) -> Squares:
        name = f"{host.arrivals.name}.{tensor_name}"
        if name not in self.found:
            self.found[name] = Squares(host.arrivals.num_experts, width)
        return self.found[name]


def collect_importance(
    model: PreTrainedModel, windows: Sequence[Window], progress: Progress | None = None
) -> dict[str, InputSquares]:
    """Run windows of text through a model on the CPU; return the mean squares of matrices' inputs.

    The mean squares, by parameter name, are (num_experts, inputs) for experts and (1, inputs) for
    linear layers other than the head.
    """
    runtime = require_runtime(model)
    executor = CollectingExecutor(runtime.store)
    total, done = sum(len(window.ids) for window in windows), 0
    one = {"logits_to_keep": 1} if takes_logits_to_keep(model) else {}
    with runtime.using(executor), _listening(model) as linear, torch.inference_mode():
        for ids in _batches(windows):
            model(input_ids=ids, use_cache=False, **one)
            done += ids.numel()
            if progress is not None:
                progress(done, total)
    return {name: squares.mean() for name, squares in (executor.found | linear).items()}


def _batches(windows: Sequence[Window]) -> Iterator[Tensor]:
    """Yield batches of windows of equal length, as ids (windows, tokens)."""
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for window in windows:
        by_length.setdefault(len(window.ids), []).append(window.ids)
    for length, rows in by_length.items():
        yield from torch.tensor(rows, device="cpu").split(max(1, _TOKENS_AT_ONCE // length))


@contextmanager
def _listening(model: PreTrainedModel) -> Iterator[dict[str, Squares]]:
    """Return a context that sums up the squares of linear layers' inputs, except the head's.

    The value of the `with` statement is a dictionary of the sums by weight name.
    """
    found: dict[str, Squares] = {}
    layers: dict[str, nn.Module] = {path: layer for path, _, _, layer in packable_layers(model)}
    layers |= dict(packed_layers(model))
    head = model.get_output_embeddings()
    handles = [
        layer.register_forward_pre_hook(_note_in(found, f"{path}.weight"))
        for path, layer in layers.items()
        if layer is not head
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _note_in(found: dict[str, Squares], name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
    def note(layer: nn.Module, given: tuple[Tensor]) -> None:
        width = int(layer.in_features)  # type: ignore[arg-type]
        inputs = given[0].flatten(0, -2)
        if inputs.shape[1] != width:  # a grouped layer: each group of rows has its own inputs
            return
        if name not in found:
            found[name] = Squares(1, width)
        found[name].add(inputs)

    return note
