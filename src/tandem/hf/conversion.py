"""Operations that move experts to the host store while Transformers reads a checkpoint.

Each operation returns an empty placeholder for the parameter, so that the module never holds its
experts. An operation's errors are kept and raised after loading, because Transformers would turn
them into a printed traceback.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from tandem.checkpoint.packed import packed_name
from tandem.checkpoint.sources.source import SourceTensor
from tandem.checkpoint.stored_experts import put_experts, put_fused
from tandem.core.errors import ModelError, TandemError, UnsupportedModelError
from tandem.experts.store.host_store import HostLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hf.adapters import stacked_rows
from tandem.hf.compat import own_conversions
from tandem.hf.load_job import Loaded, StoreWriter


def placeholder(like: Loaded) -> Tensor:
    """Return the empty tensor that stands in the module for a parameter in the host store."""
    return torch.empty(0, dtype=like.dtype, device="cpu")


class StoreFused(ConversionOps):  # type: ignore[misc]
    """Moves fused expert tensors (num_experts, ...) to the host store; passes on other tensors."""

    def __init__(self, writer: StoreWriter) -> None:
        """Use `writer`, which finds the layer of a parameter and keeps errors."""
        self.writer = writer

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Store experts of {parameter name: tensor}; return it with placeholders for them."""
        return {name: self._store(name, value) for name, value in input_dict.items()}

    def _store(self, name: str, value: Loaded | list[Loaded]) -> Loaded | list[Loaded]:
        tensor = value[0] if isinstance(value, list) else value
        found = self.writer.find(name)
        try:
            if found is None:
                if isinstance(tensor, SourceTensor):
                    return self.writer.dense.take(name, tensor)
                return value
            if (
                isinstance(tensor, Tensor) and tensor.numel() == 0
            ):  # `StoreExpertwise` has taken the values
                return value
            if self.writer.needs_nothing(found[0]):
                return placeholder(tensor)
            if isinstance(tensor, Tensor) and name in self.writer.exact:
                _refuse_values(name)
            put_fused(*found, tensor, forgets=self.writer.forgets([tensor]))
            self.writer.note_stored(found[0])
        except TandemError as error:
            self.writer.keep_error(error)
        return placeholder(tensor)

    @property
    def reverse_op(self) -> ConversionOps:
        """Raise `ModelError`: placeholders hold nothing to save."""
        raise ModelError(
            "a model with offloaded experts is saved with tandem.save(model, directory)"
        )


class StoreExpertwise(StoreFused):
    """Moves separate experts into the host store one by one, instead of merging them first.

    Replaces Transformers' merge (and concatenation of gate and up), which would hold a layer twice.
    """

    def convert(
        self,
        input_dict: dict[str, list[Loaded]],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        full_layer_name: str = "",
        **kwargs: object,
    ) -> dict[str, Tensor]:
        """Store {source pattern: [tensor per expert]}; return {target pattern: placeholder}."""
        assert source_patterns is not None
        assert target_patterns is not None
        columns = [input_dict[pattern] for pattern in source_patterns if pattern in input_dict]
        found = self.writer.find(full_layer_name)
        assert found is not None, f"{full_layer_name} is not a parameter of an experts module"
        stub = placeholder(columns[0][0])
        try:
            if not self.writer.needs_nothing(found[0]):
                read = (tensor for column in columns for tensor in column)
                _put_experts(*found, columns, forgets=self.writer.forgets(read))
                self.writer.note_stored(found[0])
        except TandemError as error:
            self.writer.keep_error(error)
        return {target_patterns[0]: stub}


class StoreStacked(StoreExpertwise):
    """Moves experts to the host store from tensors in which the rows of all experts are stacked."""

    def __init__(self, writer: StoreWriter, *, are_transposed: bool) -> None:
        """Use `writer`, which finds the layer of a parameter and keeps errors.

        `are_transposed` says that a tensor's rows are the columns of the experts' matrices.
        """
        super().__init__(writer)
        self.are_transposed = are_transposed

    def convert(
        self,
        input_dict: dict[str, list[Loaded]],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        full_layer_name: str = "",
        **kwargs: object,
    ) -> dict[str, Tensor]:
        """Store {source pattern: [tensor of all experts]}; return {target pattern: placeholder}."""
        found = self.writer.find(full_layer_name)
        assert found is not None, f"{full_layer_name} is not a parameter of an experts module"
        columns: dict[str, list[Loaded]] = {}
        for pattern, (tensor, *_) in input_dict.items():
            whole = tensor.values() if isinstance(tensor, SourceTensor) else tensor
            experts = whole.tensor_split(found[0].arrivals.num_experts)
            columns[pattern] = [expert.T if self.are_transposed else expert for expert in experts]
        return super().convert(columns, source_patterns, target_patterns, full_layer_name)


def adapter_conversions(
    model: PreTrainedModel, writer: StoreWriter
) -> list[WeightConverter | WeightRenaming]:
    """Return weight conversions for tensor names and layouts that only a model's adapters know."""
    found = own_conversions(model)
    for rows in stacked_rows(model):
        operations = [StoreStacked(writer, are_transposed=rows.are_transposed)]
        sources = list(rows.sources)
        found.append(WeightConverter(sources, rows.target, operations=operations, force_cpu=True))
    return found


class StorePacked(StoreFused):
    """Keeps the tensors of a packed checkpoint as they are: views of the mapped file."""

    def convert(
        self,
        input_dict: dict[str, list[Tensor]],
        target_patterns: list[str] | None = None,
        full_layer_name: str = "",
        **kwargs: object,
    ) -> dict[str, Tensor]:
        """Make a layer use {packed name: [tensor]}; return {parameter name: placeholder}."""
        assert target_patterns is not None
        found = self.writer.find(full_layer_name)
        assert found is not None, f"{full_layer_name} is not a parameter of an experts module"
        layer, _ = found
        names = set(target_patterns)
        for source, (tensor, *_) in input_dict.items():
            stored_name = source.removeprefix(packed_name(""))
            try:
                layer.adopt(stored_name, tensor)
            except TandemError as error:
                self.writer.keep_error(error)
            # One tensor holds all tensors of the layer.
            if stored_name not in layer.arrivals.shapes:
                names |= set(layer.arrivals.shapes)
        return {name: torch.empty(0, device="cpu") for name in names}


class ReadSource(ConversionOps):  # type: ignore[misc]
    """Dequantises weights of a source for the model's own conversions, which run afterwards."""

    def convert(
        self, input_dict: dict[str, list[Loaded]], **kwargs: object
    ) -> dict[str, list[Tensor]]:
        """Turn {pattern: [tensor or unread weight]} into {pattern: [tensor]}."""
        return {
            pattern: [t.values() if isinstance(t, SourceTensor) else t for t in tensors]
            for pattern, tensors in input_dict.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """Raise `ModelError`: values that were read are not quantised again."""
        raise ModelError("a model from a quantised checkpoint is saved with tandem.save")


def _refuse_values(name: str) -> None:
    raise UnsupportedModelError(
        f"the codes of {name} are rearranged while they load, and would be rounded again; give an "
        "expert_dtype such as int8 to accept that"
    )


def _put_experts(
    layer: HostLayer, tensor_name: str, columns: list[list[Loaded]], *, forgets: bool
) -> None:
    num_experts, num_spare = layer.arrivals.num_experts, layer.arrivals.num_spare
    for column in columns:
        if len(column) == num_experts + num_spare:
            del column[num_experts:]
    counts = {len(column) for column in columns}
    if counts != {num_experts}:
        raise ModelError(
            f"the checkpoint has {' and '.join(map(str, sorted(counts)))} tensors for the "
            f"{num_experts} experts of {layer.arrivals.name}.{tensor_name}; download the missing "
            "files again"
        )
    put_experts(layer, tensor_name, columns, forgets=forgets)
