"""Records a loaded model's routing while the model runs, and the predictions of that routing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from tandem.core.errors import UnsupportedModelError
from tandem.experts.execution.recorder import RoutingRecorder
from tandem.foreign_types import PreTrainedModel
from tandem.hf.lookahead.look_ahead import SOURCES, LookAhead, look_ahead
from tandem.hf.runtime import require_experts
from tandem.hf.token_tables import tables_by_token


@contextmanager
def recording(model: PreTrainedModel, given: LookAhead | None = None) -> Iterator[RoutingRecorder]:
    """Record the routing of all forwards in the `with` body; yield the recorder.

    The body must call the recorder's `begin_sequences` before each sequence. If the model's routers
    can be run ahead, their predictions are recorded too. A caller that has its own look-ahead for
    the model must pass it as `given`. Raises `UnsupportedModelError` for a model whose routing
    cannot be stored in a trace.
    """
    runtime = require_experts(model)
    if any(layer.arrivals.num_spare for layer in runtime.store):
        raise UnsupportedModelError(
            f"routers of {type(model).__name__} also choose experts without weights, which return "
            "their input, and a trace cannot contain those; record another model"
        )
    inner, own = runtime.executor, runtime.look_ahead
    ahead: LookAhead | str
    if own is not None and inner.asks_ahead:
        ahead = own  # the executor asks this one; a second one would make different guesses
    elif given is not None:
        ahead = given
    else:
        with runtime.using(runtime.cpu_executor()):  # these steps must not reach the listeners
            ahead = look_ahead(
                model,
                runtime.bound,
                runtime.store,
                SOURCES,
                cache_path=runtime.options.cache_path,
                residuals_path=runtime.options.residuals,
            )

    def guesses(layer: int) -> Mapping[str, Tensor]:
        if isinstance(ahead, str):
            return {}
        if ahead is not own:
            ahead(layer)
        return ahead.guesses

    by_token = [layer for layer, _ in tables_by_token(model, runtime.bound)]
    recorder = RoutingRecorder(inner, guesses, SOURCES, by_token=by_token)
    ends = ahead is not own and ahead is not given
    with runtime.using(recorder), _all_sources(ahead, ends=ends):
        yield recorder


@contextmanager
def _all_sources(ahead: LookAhead | str, *, ends: bool) -> Iterator[None]:
    """Let `ahead` use every source inside the context, and its former sources afterwards.

    If `ends`, `ahead` is closed at the end. Does nothing if `ahead` is a string: the reason why
    there is no look-ahead.
    """
    if isinstance(ahead, str):
        yield
        return
    before, ahead.sources = ahead.sources, SOURCES
    try:
        yield
    finally:
        ahead.sources = before
        if ends:
            ahead.close()
