"""Operations that Transformers runs while a checkpoint streams in: experts go to the host store.

Each returns an empty placeholder for the parameter, so that the module never holds its experts.
An operation's own errors are kept and raised after loading: Transformers would turn them into a
printed traceback.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps

from tandem.core.errors import ModelError, TandemError
from tandem.offload.host_store import HostLayer


class StoreWriter:
    """Finds the host layer of a parameter name and keeps the first error of a load."""

    def __init__(self) -> None:
        self.layers: dict[str, HostLayer] = {}
        self.error: TandemError | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoreWriter":
        # Transformers copies each converter per key; a copied store would be filled and lost.
        return self

    def find(self, parameter: str) -> tuple[HostLayer, str] | None:
        """Return (layer, tensor name) of a parameter such as `layers.3.mlp.experts.down_proj`."""
        module, _, tensor_name = parameter.rpartition(".")
        layer = self.layers.get(module)
        return (layer, tensor_name) if layer and tensor_name in layer.arrivals.shapes else None

    def keep_error(self, error: TandemError) -> None:
        """Remember the first error; the load fails with it at its end."""
        self.error = self.error or error


def placeholder(like: Tensor) -> Tensor:
    """Return the empty tensor that stands in the module for a parameter in the host store."""
    return torch.empty(0, dtype=like.dtype)


class StoreFused(ConversionOps):  # type: ignore[misc]
    """Move fused expert tensors (num_experts, ...) into the host store; pass the rest through."""

    def __init__(self, writer: StoreWriter) -> None:
        """Write to the layers that a writer knows."""
        self.writer = writer

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Store each tensor of {parameter name: tensor} that belongs to an experts module."""
        return {name: self._store(name, value) for name, value in input_dict.items()}

    def _store(self, name: str, value: Any) -> Any:
        tensor = value[0] if isinstance(value, list) else value
        found = self.writer.find(name)
        if found is None or tensor.numel() == 0:  # numel 0: `StoreExpertwise` was here before
            return value
        layer, tensor_name = found
        try:
            layer.put(tensor_name, tensor)
        except TandemError as error:
            self.writer.keep_error(error)
        return placeholder(tensor)

    @property
    def reverse_op(self) -> ConversionOps:
        """Refuse: the placeholders hold nothing that could be saved."""
        raise ModelError(
            "a model with offloaded experts is saved with tandem.save(model, directory)"
        )


class StoreExpertwise(StoreFused):
    """Move separate experts into the host store one by one, instead of merging them first.

    Replaces Transformers' merge (and concatenation of gate and up), which hold a layer twice.
    """

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Store {source pattern: [one tensor per expert]} as one fused tensor of the layer."""
        assert source_patterns is not None
        assert target_patterns is not None
        columns = [input_dict[pattern] for pattern in source_patterns if pattern in input_dict]
        found = self.writer.find(full_layer_name)
        assert found is not None, f"{full_layer_name} is no parameter of an experts module"
        stub = placeholder(columns[0][0])
        try:
            _put_experts(*found, columns)
        except TandemError as error:
            self.writer.keep_error(error)
        return {target_patterns[0]: stub}


class StorePacked(StoreFused):
    """Keep the tensors of a packed checkpoint as they are: views of the mapped file."""

    def __init__(self, writer: StoreWriter, stored_name: str) -> None:
        """Adopt tensors that stand in the files under `stored_name`."""
        super().__init__(writer)
        self.stored_name = stored_name

    def convert(
        self,
        input_dict: dict[str, Any],
        target_patterns: list[str] | None = None,
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Adopt {packed name: [tensor]}; returns placeholders for the parameters in it."""
        assert target_patterns is not None
        (tensors,) = input_dict.values()
        found = self.writer.find(full_layer_name)
        assert found is not None, f"{full_layer_name} is no parameter of an experts module"
        layer, _ = found
        try:
            layer.adopt(self.stored_name, tensors[0])
        except TandemError as error:
            self.writer.keep_error(error)
        is_whole_layer = self.stored_name not in layer.arrivals.shapes
        names = layer.arrivals.shapes if is_whole_layer else target_patterns
        return {name: torch.empty(0) for name in names}


def _put_experts(layer: HostLayer, tensor_name: str, columns: list[list[Tensor]]) -> None:
    counts = {len(column) for column in columns}
    num_experts = layer.arrivals.num_experts
    if counts != {num_experts}:
        raise ModelError(
            f"the checkpoint has {' and '.join(map(str, sorted(counts)))} tensors for the "
            f"{num_experts} experts of {layer.arrivals.name}.{tensor_name}; download the missing "
            "files again"
        )
    for expert in range(num_experts):
        layer.put_expert(tensor_name, expert, [column[expert] for column in columns])
        for column in columns:  # free the source as we go: a layer is never whole twice
            column[expert] = column[expert].new_empty(0)
