"""Methods that Tandem adds to a model's class: closing, counting experts, refusing copies.

The class of a loaded model is replaced by a subclass of the same name, as in FSDP2, because `with`
and `copy` look methods up in the class.
"""

import math
from collections.abc import Iterable
from functools import cache
from types import TracebackType
from typing import NoReturn, Self

import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.devices.cuda.embedding import HostEmbedding
from tandem.experts.store.stand_in import refuse_to_copy
from tandem.foreign_types import PreTrainedModel
from tandem.hf.packed_layers import PackedModule
from tandem.hf.row_tables import DiskEmbedding, tables_on_disk
from tandem.hf.runtime import Runtime, give_runtime, require_runtime
from tandem.kernels.dense import DenseWeight


class OffloadedModel:
    """Methods of every model that Tandem has loaded; they override those of the model's class."""

    def close(self) -> None:
        """Free the experts' memory and end their threads; a second call does nothing.

        The model cannot run afterwards. Closing is not needed once the model's last reference is
        gone.
        """
        require_runtime(self).close()
        for table in tables_on_disk(self):  # type: ignore[arg-type]
            table.tables.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def to(self, *args: object, **kwargs: object) -> Self:
        """Move or cast the dense parts as torch does; the experts stay where they are.

        Raises `ConfigError` for the meta device, where the dense parts would lose their values.
        """
        target = kwargs.get("device", args[0] if args else kwargs.get("tensor"))
        if isinstance(target, Tensor):
            target = target.device
        if isinstance(target, str | torch.device) and torch.device(target).type == "meta":
            raise ConfigError(
                "the model cannot be moved to the device 'meta', which keeps shapes but no values, "
                "because its experts stay in Tandem's host store; model.close() frees all its "
                "memory, and AutoModelForCausalLM.from_config(config) under torch.device('meta') "
                "makes a model that has only shapes"
            )
        super().to(*args, **kwargs)  # type: ignore[misc]
        return self

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count parameters as Transformers does, including those of experts and packed layers."""
        count = int(super().num_parameters(only_trainable, exclude_embeddings))  # type: ignore[misc]
        if only_trainable:
            return count
        for layer in require_runtime(self).store:
            count += sum(math.prod(shape) for shape in layer.arrivals.shapes.values())
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, HostEmbedding | DiskEmbedding) and not exclude_embeddings:
                count += module.num_embeddings * module.embedding_dim
        for weight in self._packed_weights():
            count += weight.out_features * (weight.in_features + (weight.bias is not None))
        return count

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Return the bytes of the model, including packed weights and experts in host memory."""
        num_bytes = int(super().get_memory_footprint(return_buffers))  # type: ignore[misc]
        packed = sum(weight.num_bytes for weight in self._packed_weights())
        runtime = require_runtime(self)
        return num_bytes + packed + (runtime.host_slots or runtime.store).num_bytes

    def _packed_weights(self) -> Iterable[DenseWeight]:
        """Return each packed matrix once: a head and embeddings may share one."""
        modules = [m for m in self.modules() if isinstance(m, PackedModule)]  # type: ignore[attr-defined]
        return {module.packed.matrix.data.data_ptr(): module.packed for module in modules}.values()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_to_copy()


def as_offloaded(model: PreTrainedModel, runtime: Runtime) -> None:
    """Give a model its runtime and the methods of `OffloadedModel`."""
    give_runtime(model, runtime)
    if not isinstance(model, OffloadedModel):
        model.__class__ = _offloaded_class(type(model))  # type: ignore[arg-type]


@cache
def _offloaded_class(kind: type) -> type:
    # Transformers identifies classes by module and name.
    own = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (OffloadedModel, kind), own)
