"""A shallow copy of a model: the same tensors and hooks, but modules and configs of its own.

Tandem's steps use the substitutions (`tandem.decode.substitutions`) while another thread may run
the model itself. Only modules that differ are copied: those with substitutions, those that read the
config for attention, and their parents.
"""

import functools
from types import CellType, FunctionType, MethodType
from typing import cast

from torch import nn
from transformers import PreTrainedConfig

from tandem.decode.substitutions import FUNCTIONS, METHODS
from tandem.decode.substitutions.attention import register_attention
from tandem.decode.substitutions.substitution import Function, instead
from tandem.foreign_types import ModelPart, PreTrainedModel
from tandem.hf.compat import config_to_step
from tandem.hf.experts import is_experts_module
from tandem.kernels.torch_private import children_by_name, copy_module


class ShallowCopy:
    """Holds a model's copy with substitutions; copies again if modules of the model changed."""

    def __init__(self, model: nn.Module) -> None:
        """Copy a model."""
        self._original, self._attention = model, register_attention()
        self._renew()

    @property
    def model(self) -> PreTrainedModel:
        """The copy of the model in its present state."""
        if any(children_by_name(module) != known for module, known in self._known):
            self._renew()
        return cast("PreTrainedModel", self._copies[self._original])

    def _renew(self) -> None:
        self._copies: dict[nn.Module, nn.Module] = {}
        self._configs: dict[int, PreTrainedConfig] = {}
        self._known: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
        """Each module's children at the time of the copy."""
        self._copy(self._original)

    def _copy(self, module: nn.Module) -> nn.Module:
        """Return a module's copy, or the module itself if its copy would not differ from it."""
        if module in self._copies:
            return self._copies[module]
        children = dict(children_by_name(module))
        copies = {child: self._copy(child) for child in children.values() if child is not None}
        config: dict[str, object] = {}
        if _may_attend(module):
            config["config"] = config_to_step(module.config, self._attention, self._configs)
        copy, methods = module, _methods(cast("ModelPart", module))
        if config or methods or any(child is not copied for child, copied in copies.items()):
            copy = copy_module(module, copies, config)
            for name, method in methods.items():
                setattr(copy, name, MethodType(method, copy))
            self._known.append((module, children))
        self._copies[module] = copy
        return copy


def _may_attend(module: nn.Module) -> bool:
    """Tell whether a module may read its config for attention.

    False for experts modules and rotary embeddings, which must not be copied: experts are bound to
    executors later, and rotary embeddings store the last frequencies.
    """
    if not isinstance(vars(module).get("config"), PreTrainedConfig):
        return False
    is_leaf = not any(True for _ in module.children())
    is_table = is_leaf and any(True for _ in module.buffers(recurse=False))
    return not is_table and not is_experts_module(module)


def _methods(module: ModelPart) -> dict[str, Function]:
    """Return the methods of a module's copy that differ from its class's, by name."""
    kind = type(module)
    methods = {
        one.method: instead(getattr(kind, one.method), one.forward)
        for one in METHODS
        if one.matches(module)
    }
    forward = with_functions(kind.forward)
    return methods if forward is None else {"forward": forward, **methods}


@functools.cache
def with_functions(function: FunctionType) -> FunctionType | None:
    """Return a copy of `function` that calls substitutes of `FUNCTIONS` in place of the originals.

    None if `function` calls no function that has a substitute. Functions inside decorators
    (`__wrapped__`) are copied, too.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        changed = with_functions(inner)
        cells = function.__closure__ or ()
        if changed is None or all(cell.cell_contents is not inner for cell in cells):
            return None
        new = tuple(CellType(changed) if c.cell_contents is inner else c for c in cells)
        return _copy_function(function, function.__globals__, new)
    scope = function.__globals__
    names = FUNCTIONS.keys() & set(function.__code__.co_names) & scope.keys()
    found = {name: FUNCTIONS[name](scope[name]) for name in names}
    ours = {name: instead(scope[name], one) for name, one in found.items() if one is not None}
    return _copy_function(function, scope | ours, function.__closure__) if ours else None


def _copy_function(
    function: FunctionType, scope: dict[str, object], closure: tuple[CellType, ...] | None
) -> FunctionType:
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
