"""The `Runtime`, which holds and runs the experts of a loaded model; `runtime_of` finds it.

The quantizer creates the runtime while Transformers loads the model. Afterwards the runtime belongs
to the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor, nn

from tandem.core.errors import ConfigError, ModelError, UnsupportedModelError
from tandem.experts.cache.host_slots import HostSlots
from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.executor import CpuExecutor, Executor
from tandem.experts.store.host_store import HostLayer, HostStore
from tandem.experts.store.packed_layer import InputImportance
from tandem.foreign_types import PreTrainedModel
from tandem.hf.config import OffloadConfig
from tandem.hf.experts import bind_all
from tandem.hf.lookahead.look_ahead import LookAhead
from tandem.kernels.dense import CpuThreads

_ATTRIBUTE = "tandem_runtime"  # attribute of the model
_CLOSED = "the model has been closed; load it again"


class _ClosedExecutor(Executor):
    """Replaces the executor of a closed model: every use raises `ConfigError`."""

    needs_steps = True  # so that a step is refused before the model's own layers run

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> NoReturn:
        """Raise `ConfigError`: the model has been closed."""
        raise ConfigError(_CLOSED)

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        """Raise `ConfigError`: the model has been closed."""
        raise ConfigError(_CLOSED)


@dataclass(eq=False)
class Runtime:
    """A model's experts, their executor, and the options that chose it."""

    options: OffloadConfig
    store: HostStore
    executor: Executor = field(init=False)
    bound: list[tuple[nn.Module, int]] = field(default_factory=list)
    """Each experts module with its layer index in the store."""
    layers: dict[str, HostLayer] = field(default_factory=dict)
    """The layers by experts module name, tied modules included."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device of the dense parts after loading."""
    look_ahead: LookAhead | None = None
    """Predicts the next layer's experts for the executor; None: no look-ahead."""
    kv_dtype: str = "auto"
    """The default dtype of keys and values; "auto" is the model's dtype."""
    host_slots: HostSlots | None = None
    """Holds some of the experts in memory; None: all experts are in memory."""
    importance: InputImportance | None = None
    """The importance of inputs for rounding weights; None: all inputs count the same."""
    is_closed: bool = False
    _threads: CpuThreads | None = None

    def __post_init__(self) -> None:
        """Start with an executor that computes all experts on the CPU."""
        self.executor = self.cpu_executor()

    @property
    def threads(self) -> CpuThreads:
        """The threads that experts, packed linear layers and attention share."""
        if self._threads is None:
            options = self.options
            self._threads = CpuThreads(num_threads=options.num_threads, isa=options.isa or "")
        return self._threads

    def choose(self, options: OffloadConfig) -> None:
        """Replace the options; other threads or another ISA apply when `threads` is read next."""
        before = self.options
        if (options.num_threads, options.isa) != (before.num_threads, before.isa):
            self._threads = None
        self.options = options

    def share(self, threads: CpuThreads) -> None:
        """Use another model's threads, and a new executor that computes all experts on the CPU."""
        self._threads = threads
        self.use(self.cpu_executor())

    def cpu_executor(self) -> CpuExecutor:
        """Return a new executor that computes every expert on the CPU, with `threads`."""
        return CpuExecutor(self.store, self.threads)

    def end_executor(self) -> None:
        """Close the present executor and its look-ahead."""
        self.executor.close()
        if self.look_ahead is not None:
            self.look_ahead.close()
            self.look_ahead = None

    @contextmanager
    def looking_ahead(self, ahead: LookAhead | None) -> Iterator[LookAhead | None]:
        """Install a look-ahead, if given, and yield it; an error inside closes and removes it."""
        self.look_ahead = ahead
        try:
            yield ahead
        except BaseException:
            if ahead is not None:
                ahead.close()
            self.look_ahead = None
            raise

    def use(self, executor: Executor) -> None:
        """Run the experts through `executor` from now on; it may wrap the present executor."""
        self.executor = executor
        bind_all(self.bound, executor)

    @contextmanager
    def using(self, executor: Executor) -> Iterator[None]:
        """Run the experts through `executor` inside the context; afterwards as before."""
        before = self.executor
        self.use(executor)
        try:
            yield
        finally:
            self.use(before)

    def require_open(self) -> None:
        """Raise `ConfigError` if the model has been closed."""
        if self.is_closed:
            raise ConfigError(_CLOSED)

    def require_here(self) -> None:
        """Raise `ModelError` in a forked process if experts are on the disk.

        The threads that read experts exist only in the original process.
        """
        if self.host_slots is not None:
            self.host_slots.native.require_here()

    def close(self) -> None:
        """Free the experts' memory and end all threads; the model cannot run afterwards."""
        if self.is_closed:
            return
        self.is_closed = True
        self.end_executor()
        self.store, self.host_slots = HostStore(), None
        self.use(_ClosedExecutor(self.store))
        self.bound.clear()
        self.layers.clear()  # Transformers keeps the operations that it used for loading
        self._threads = None


def runtime_of(model: nn.Module) -> Runtime | None:
    """Return the runtime of a model that Tandem loaded; None for other models."""
    runtime: Runtime | None = getattr(model, _ATTRIBUTE, None)
    return runtime


def importance_of(model: nn.Module, path: str, weight: Tensor) -> Tensor | None:
    """Return the importance of a linear layer's inputs, (in_features,); None: all are equal."""
    runtime = runtime_of(model)
    if runtime is None or runtime.importance is None:
        return None
    found = runtime.importance(f"{path}.weight", (1, weight.shape[1]))
    return None if found is None else found[0]


def give_runtime(model: PreTrainedModel, runtime: Runtime) -> None:
    """Attach a runtime to a model; `runtime_of` returns it from now on."""
    vars(model)[_ATTRIBUTE] = runtime


def require_experts(model: PreTrainedModel) -> Runtime:
    """Return the runtime of a model with experts; `UnsupportedModelError` for a dense model.

    Also raises as `require_runtime` and `Runtime.require_open` do.
    """
    runtime = require_runtime(model)
    runtime.require_open()
    if not len(runtime.store):
        raise UnsupportedModelError(
            f"{type(model).__name__} is a dense model: it has no experts to route, share or "
            "measure; give a model with experts"
        )
    return runtime


def require_runtime(model: PreTrainedModel) -> Runtime:
    """Return the runtime of a model that Tandem loaded; raises `ModelError` for other models."""
    runtime = runtime_of(model)
    if runtime is None:
        raise ModelError(
            f"Tandem did not load this {type(model).__name__}; load it with tandem.load(...)"
        )
    return runtime
