"""A placeholder in a state dict for a tensor of the host store: it has a shape, but cannot be read.

The state dict then lists all names, and writing it to a file fails instead of omitting the experts.
"""

from typing import NoReturn

import torch
from torch import Tensor, nn

from tandem.core.errors import ConfigError
from tandem.kernels.torch_private import tensor_without_values


def refuse_to_copy() -> NoReturn:
    """Raise `ConfigError`, because a copy or pickle would lack the experts."""
    raise ConfigError(
        "the experts of this model are in Tandem's host store, so it cannot be copied, pickled or "
        "written like other models; write it with tandem.save(model, directory)"
    )


class StandIn(Tensor):
    """A tensor without values, with a shape and a dtype."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> "StandIn":
        """Create the tensor without memory."""
        made: StandIn = tensor_without_values(cls, shape, dtype)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        """Refuse every operation but `detach`, which `state_dict` calls."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        refuse_to_copy()

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        """Show shape and dtype."""
        return f"StandIn({tuple(self.shape)}, {self.dtype})"

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        refuse_to_copy()

    __reduce_ex__ = __deepcopy__ = _refuse
    data_ptr = numpy = storage = untyped_storage = contiguous = _refuse


def keep_elsewhere(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
    """Prepare an experts module with empty parameters: the host store has its tensors.

    Adapters and loading of state dicts are refused. The module's own state dict shows the tensors
    as stand-ins with these `shapes`.
    """
    for name in shapes:
        empty = module.get_parameter(name).data
        setattr(module, name, KeptElsewhere(empty, requires_grad=False))
    module.register_state_dict_post_hook(_ShowInStateDict(shapes))
    module.register_load_state_dict_pre_hook(refuse_to_load)


class KeptElsewhere(nn.Parameter):
    """An experts module's empty parameter, which refuses to be wrapped by an adapter."""

    @property
    def ndim(self) -> NoReturn:  # type: ignore[override]
        """Refuse: PEFT reads this or `ds_shape` before it wraps a parameter."""
        _refuse_to_adapt()

    @property
    def ds_shape(self) -> NoReturn:
        """Refuse: see `ndim`."""
        _refuse_to_adapt()


def _refuse_to_adapt() -> NoReturn:
    raise ConfigError(
        "an adapter cannot change experts, because Tandem computes them; name other modules, such "
        "as target_modules=['q_proj', 'v_proj'], instead of 'all-linear'"
    )


def refuse_to_load(*_: object) -> NoReturn:
    """Raise `ConfigError`, because a state dict cannot be loaded into packed weights."""
    raise ConfigError(
        "load_state_dict cannot write into weights that Tandem keeps or has packed; save the "
        'changed model with Transformers and load that with tandem.load, where dense_dtype="none" '
        "leaves linear layers as they are"
    )


class _ShowInStateDict:
    """A hook by which state dicts show an experts module's tensors in their true shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Show tensors of these names and shapes."""
        self._shapes = shapes

    def __call__(
        self, module: nn.Module, found: dict[str, object], prefix: str, metadata: object
    ) -> None:
        """Put stand-ins into the state dict."""
        for name, shape in self._shapes.items():
            found[prefix + name] = StandIn(shape, module.get_parameter(name).dtype)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Raises for any code that copies or pickles this module or one that contains it.
        refuse_to_copy()
