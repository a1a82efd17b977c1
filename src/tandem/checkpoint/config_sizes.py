"""Compares the sizes in a config with what a checkpoint's tensors can hold.

`require_sizes` compares the numbers alone, before Transformers makes lists with an item per layer.
`counted_build` stops the construction of a model that outgrows the tensors.
"""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tandem.checkpoint.json_files import is_int, shown
from tandem.core.errors import ModelError

_LAYERS = re.compile(r"(.*_)?layers|n_layer|depth")
_NUMBER = re.compile(r"(?<!experts)\.(\d{1,9})(?![^.])")
# Not sizes; published configs have values beyond 10^10.
_UNBOUNDED = re.compile(r".*(theta|base|max_length)")
# In tiny models, keys unrelated to the number of layers may exceed the number of tensors.
_FEW_LAYERS = 256
# The limit for numbers that size no tensor, such as positions and bases of rotary embeddings.
_MOST_OF_ANYTHING = 1 << 31
# A layer has about ten tensors, and twice as many modules without any.
_MODULES_PER_TENSOR = 16
_FEW_MODULES = 2_000
# Tied weights count twice while the model is built.
_SLACK = 2
_FEW_ELEMENTS = 1 << 22
_SHOWN_SIZES = 3


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """Upper limits on layers and weights, derived from a checkpoint's tensors.

    Sizes in the config are checked against them.
    """

    names: Iterable[str]
    num_tensors: int
    num_elements: int
    """The largest number of weights that the tensors can hold."""

    @property
    def num_layers(self) -> int:
        """One more than the highest layer number in the tensors' names."""
        found = (int(number) for name in self.names for number in _NUMBER.findall(name))
        return 1 + max(found, default=0)


def require_sizes(where: str, config: Mapping[str, object], held: HeldTensors) -> None:
    """Raise `ModelError` for a size in the config that is impossible with the tensors of `held`."""
    most_layers = max(held.num_tensors, _FEW_LAYERS)
    most = max(held.num_elements, _MOST_OF_ANYTHING)
    for key, value in _numbers(config):
        if _LAYERS.fullmatch(key) and value > most_layers:
            raise ModelError(
                f"{where}: {key} is {shown(value)}, and the model has {held.num_tensors} tensors; "
                "use the config.json that belongs to these weights"
            )
        if abs(value) > most and not _UNBOUNDED.fullmatch(key):
            raise ModelError(
                f"{where}: {key} is {shown(value)}, expected at most {most}, more than the "
                "model's tensors hold; use the config.json that belongs to these weights"
            )


def require_layers(where: str, num_layers: object, held: HeldTensors) -> None:
    """Raise `ModelError` if the config has more layers than the tensors' names show."""
    if is_int(num_layers) and num_layers > held.num_layers:
        raise ModelError(
            f"{where}: num_hidden_layers is {num_layers}, and the tensors are of "
            f"{held.num_layers} layers; use the config.json that belongs to these weights"
        )


@contextmanager
def counted_build(where: str, config: Mapping[str, object], held: HeldTensors) -> Iterator[None]:
    """Raise `ModelError` once the `with` body creates more modules or weights than `held` allows.

    Only what this thread creates is counted. Parameters and buffers must be on the meta device, so
    that they are counted before any memory is allocated.
    """
    counts = _Counts(where, config, held)
    handles = (
        register_module_module_registration_hook(counts.on_module),
        register_module_parameter_registration_hook(counts.on_tensor),
        register_module_buffer_registration_hook(counts.on_tensor),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Counts:
    """Counts the modules and weights of a model that is being built."""

    def __init__(self, where: str, config: Mapping[str, object], held: HeldTensors) -> None:
        self._where, self._config = where, config
        self._thread = threading.get_ident()
        self._most_modules = _MODULES_PER_TENSOR * held.num_tensors + _FEW_MODULES
        self._most_elements = _SLACK * held.num_elements + _FEW_ELEMENTS
        self._held = held
        self._modules = self._elements = 0

    def on_module(self, module: nn.Module, name: str, added: object) -> None:
        if threading.get_ident() != self._thread:
            return
        self._modules += 1
        if self._modules > self._most_modules:
            self._refuse(f"more than {self._most_modules} modules", name)

    def on_tensor(self, module: nn.Module, name: str, added: Tensor | None) -> None:
        if threading.get_ident() != self._thread or added is None:
            return
        self._elements += added.numel()
        if self._elements > self._most_elements:
            what = f"more weights than its {self._held.num_tensors} tensors hold"
            self._refuse(f"{what}, {self._held.num_elements}", f"{type(module).__name__}.{name}")

    def _refuse(self, what: str, name: str) -> None:
        sizes = sorted(_numbers(self._config), key=lambda pair: -pair[1])
        largest = ", ".join(f"{key} {value}" for key, value in dict(sizes[:_SHOWN_SIZES]).items())
        raise ModelError(
            f"{self._where} describes a model of {what} (at {name}); its largest sizes are "
            f"{largest}: use the config.json that belongs to these weights"
        )


def _numbers(content: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """Yield (key, value) of each whole number in a config, also in nested objects and lists.

    Numbers in a list have the key of the list.
    """
    left: list[tuple[str, object]] = list(content.items())
    while left:
        key, value = left.pop()
        if is_int(value):
            yield key, value
        elif isinstance(value, dict):
            left += ((str(inner), one) for inner, one in value.items())
        elif isinstance(value, list | tuple):
            left += ((key, one) for one in value)
