"""A shallow copy of a model: the same tensors and hooks, but modules and configs of its own.

So Tandem's steps have their attention and their norms while another thread runs the model as it is.
Only modules that differ are copied: those that ask the config for attention or call operations that
are native here, and what holds them.
"""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from tandem.decode.latents import latent_methods
from tandem.decode.named_operations import forward_with_operations
from tandem.decode.state_forwards import forward_for
from tandem.hf.compat import config_to_step
from tandem.hf.experts import is_experts_module
from tandem.kernels.torch_private import children_by_name, copy_module
from tandem.kv_cache.block_indexers import methods_for


class ShallowCopy:
    """A model's copy with another attention function; follows the model when parts are replaced."""

    def __init__(
        self,
        model: nn.Module,
        attention: str,
        forwards: Mapping[nn.Module, Callable[..., Tensor]],
    ) -> None:
        """Copy a model; Transformers knows `attention` by name, `forwards` are of the copies."""
        self._original, self._attention, self._forwards = model, attention, forwards
        self._renew()

    @property
    def model(self) -> Any:
        """The copy of the model as it is now."""
        if any(children_by_name(module) != known for module, known in self._known):
            self._renew()
        return self._copies[self._original]

    def _renew(self) -> None:
        self._copies: dict[nn.Module, nn.Module] = {}
        self._configs: dict[int, PreTrainedConfig] = {}
        self._known: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
        """The children that each module had when it was copied."""
        self._copy(self._original)

    def _copy(self, module: nn.Module) -> nn.Module:
        """Return a module's copy, or the module if nothing in it differs."""
        if module in self._copies:
            return self._copies[module]
        children = dict(children_by_name(module))
        copies = {child: self._copy(child) for child in children.values() if child is not None}
        own: dict[str, Any] = {}
        if _may_attend(module):
            own["config"] = config_to_step(module.config, self._attention, self._configs)
        if module in self._forwards:
            own["forward"] = self._forwards[module]
        forward = None if "forward" in vars(module) else _forward_of(module)
        copy = module
        methods = {**methods_for(module), **latent_methods(module)}
        if (
            own
            or forward
            or methods
            or any(child is not copied for child, copied in copies.items())
        ):
            copy = copy_module(module, copies, own)
            if forward is not None:
                copy.forward = MethodType(forward, copy)
            for name, method in methods.items():
                setattr(copy, name, MethodType(method, copy))
            self._known.append((module, children))
        self._copies[module] = copy
        return copy


def _forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward of a module's copy; None: it is the module's own."""
    return forward_with_operations(type(module)) or forward_for(module)


def _may_attend(module: nn.Module) -> bool:
    """Tell whether a module may ask its config for attention.

    Experts are bound to executors again later, and rotary embeddings note the frequencies that
    they have computed last: both stay one object.
    """
    if not isinstance(getattr(module, "config", None), PreTrainedConfig):
        return False
    is_leaf = not any(True for _ in module.children())
    is_table = is_leaf and any(True for _ in module.buffers(recurse=False))
    return not is_table and not is_experts_module(module)
