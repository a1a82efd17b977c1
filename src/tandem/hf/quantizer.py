"""The quantizer, through which `from_pretrained` hands a model's experts to Tandem.

Transformers calls it before it loads weights (to find the experts modules and announce their
layers), for each expert tensor (to move it into the host store), and after it has loaded all
weights (to bind the modules to the executor).
"""

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.quantizers.base import HfQuantizer

from tandem.checkpoint.mapped_files import copy_out_of_files, map_ahead, mapped_tensors
from tandem.checkpoint.packed import INDEX_FILE, packed_name
from tandem.checkpoint.sources.safetensors_header import TensorEntry
from tandem.checkpoint.weight_report import (
    require_finite_weights,
    require_shapes,
    require_source_shapes,
)
from tandem.core.errors import ConfigError, TandemWarning, UnsupportedModelError
from tandem.experts.store import host_memory
from tandem.experts.store.arrivals import TENSOR_NAMES
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.packed_layer import STORED_NAME, STORED_ORDER_NAME
from tandem.experts.store.stand_in import keep_elsewhere
from tandem.foreign_types import ModelPart, PreTrainedConfig, PreTrainedModel
from tandem.hf.adapters import put_on_interface
from tandem.hf.adapters.refused import why_no_adapter
from tandem.hf.announced_layers import announce, room_left, source_dtype_of
from tandem.hf.assembly import assemble
from tandem.hf.compat import QuantizerHooks, is_expert_merge, target_names, use_experts
from tandem.hf.config import (
    OffloadConfig,
    parse_dense_dtype,
    parse_expert_dtype,
)
from tandem.hf.conversion import (
    ReadSource,
    StoreExpertwise,
    StoreFused,
    StorePacked,
    adapter_conversions,
)
from tandem.hf.dense import has_kernels, has_quantised_experts, place_on, tied_weights
from tandem.hf.dense_bytes import dense_bytes_with, short_memory
from tandem.hf.dense_codes import quantised_layers
from tandem.hf.dense_files import expect_stored_layers
from tandem.hf.dense_place import dense_device, free_device_bytes
from tandem.hf.experts import EXPERTS_IMPLEMENTATION, is_experts_module
from tandem.hf.importance import weigh_by
from tandem.hf.load_job import LoadJob
from tandem.hf.offloaded_model import as_offloaded
from tandem.hf.packed_reading import map_packed
from tandem.hf.packed_writer import LayerSink
from tandem.hf.row_tables import entries_of, leave_on_disk, row_tables, warn_of_tables
from tandem.hf.runtime import Runtime
from tandem.hf.steps import announce_steps
from tandem.hf.whole_model import require_room_for
from tandem.kernels.formats.weight_format import ExpertFormat, WeightFormat


class OffloadQuantizer(QuantizerHooks, HfQuantizer):  # type: ignore[misc]
    """Keeps a model's experts in host memory; everything else loads as Transformers loads it."""

    quantization_config: OffloadConfig

    def __init__(
        self, quantization_config: OffloadConfig, *, job: LoadJob | None = None, **kwargs: object
    ) -> None:
        super().__init__(quantization_config, **kwargs)
        # `merge_quantization_configs` treats every model whose config.json names Tandem as
        # quantised.
        self.pre_quantized = quantization_config.packed_format is not None
        self._job = job or LoadJob.present(quantization_config)
        self._writer = self._job.writer
        self.runtime = Runtime(quantization_config, HostStore(), layers=self._writer.layers)
        self._targets: dict[str, str] = {}
        """For each tensor's name in the source, the name of the parameter that it belongs to."""
        self._from_source: set[str] = set()
        self._own_conversions: list[WeightConverter | WeightRenaming] = []
        """Conversions of names and layouts that only adapters know."""
        self._shapes: dict[str, torch.Size] = {}
        """The shapes of the dense parameters, from the config."""

    def validate_environment(self, **kwargs: object) -> None:
        """Do nothing: `update_device_map` refuses devices that Tandem cannot use."""

    def update_device_map(self, device_map: object) -> None:
        """Set the device of the dense parts; return None, so that weights are read on the host."""
        chosen = self._job.device
        self.runtime.device = chosen or dense_device(self.quantization_config, device_map)

    def prepare_config(self, config: PreTrainedConfig) -> None:
        """Set the name of the packed files' index, which Transformers does not know."""
        if self.pre_quantized:
            config.transformers_weights = INDEX_FILE

    def announce_layers(self, model: PreTrainedModel) -> dict[str, ModelPart]:
        """Find a model's experts modules, and announce a layer in the store for each.

        Returns the modules by name, without modules tied to other modules; empty for a dense model.
        Raises `UnsupportedModelError` for experts in other modules, and `ConfigError` for options
        that need experts.
        """
        put_on_interface(model)
        self._own_conversions = adapter_conversions(model, self._writer)
        modules = {n: m for n, m in model.named_modules() if is_experts_module(m)}
        if not modules:
            _require_no_experts(model)
            is_on_gpu = self.runtime.device.type != "cpu"
            self._job.options.require_dense(_named(model), is_on_gpu=is_on_gpu)
        sources = {name: _tied_to(model, name) for name in modules}
        own = {name: module for name, module in modules.items() if sources[name] == name}
        formats = self._expert_formats(model, list(own))
        for name, module in own.items():
            self._writer.layers[name] = announce(self.runtime.store, name, module, formats[name])
        for name, module in modules.items():
            layer = self._writer.layers[sources[name]]
            self._writer.layers[name] = layer
            self.runtime.bound.append((module, layer.layer))
        return own

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **kwargs: object
    ) -> PreTrainedModel:
        source, sink = self._job.source, self._job.sink
        if not self.pre_quantized:
            self.quantization_config.require_no_slots(type(model).__name__)
        own, store = self.announce_layers(model), self.runtime.store
        if self._job.importance is not None:
            weigh_by(self._job.importance, model, self.runtime)
        if source is not None:
            require_source_shapes(model, source.weights, self._targets)
        if sink is not None:
            self._begin(sink, model, own)
        dense_format = parse_dense_dtype(self.quantization_config.dense_dtype)
        if self.pre_quantized and dense_format is not None:
            others = self.quantization_config.dense_formats or {}
            held = self._entries(kwargs.get("checkpoint_files"))
            expect_stored_layers(model, dense_format, others, held)
        is_here = self.runtime.device.type == "cpu"
        formats: dict[str, WeightFormat | None] = {}
        if is_here or has_kernels():
            formats = self.dense_code_formats(model, on_device=not is_here)
            self._writer.dense.expect(formats, tied_weights(model))
        if not all(f"{path}.weight" in formats for path in row_tables(model)):
            self._leave_tables(model, own, formats, kwargs.get("checkpoint_files"))
        if not (own or is_here):
            is_stored = self.pre_quantized
            require_room_for(
                model, self.runtime.device, self._job.options, formats, is_stored=is_stored
            )
        if sink is None and not self.pre_quantized:  # a packed file is only mapped
            # Plain weights that go to a GPU are views of the files, so they take no memory here.
            is_counted = is_here or source is not None
            dense_bytes = dense_bytes_with(model, formats) if is_counted else 0
            room = room_left(store, own, dense_bytes, model.dtype)
            self._writer.bytes_to_forget = 0 if source is None else source.num_bytes - room
        self._shapes = {
            name: parameter.shape
            for name, parameter in model.named_parameters()
            if not self.param_needs_quantization(model, name)
        }
        return model

    def _begin(
        self, sink: LayerSink, model: PreTrainedModel, experts: dict[str, ModelPart]
    ) -> None:
        """Tell a sink the expected bytes, and let it complete layers that an earlier run packed."""
        store = self.runtime.store
        tables = sum(table.weight.nbytes for table in row_tables(model).values())
        sink.begin(store.expected_bytes(source_dtype_of(experts, model.dtype)), tables)
        for layer in store:
            sink.resume(layer)

    def _leave_tables(
        self,
        model: PreTrainedModel,
        experts: dict[str, ModelPart],
        formats: Mapping[str, WeightFormat | None],
        files: object,
    ) -> None:
        """Leave tables of rows on the disk if host or GPU memory cannot hold the whole model.

        Tables also stay on the disk while a model is packed: they are copied from file to file.
        """
        job, device = self._job, self.runtime.device
        short = short_memory(
            self.runtime.store.expected_bytes(source_dtype_of(experts, model.dtype)),
            dense_bytes_with(model, formats),
            host_memory.available_bytes(),
            expert_memory_bytes=job.options.expert_memory_bytes,
            device_bytes=None if device.type == "cpu" else free_device_bytes(device),
        )
        if job.sink is None and short is None:
            return
        read = files if isinstance(files, list) else []
        left = leave_on_disk(model, self._entries(files))
        # Transformers maps each file writable, which the system refuses for a large one.
        read[:] = [file for file in read if Path(file) not in left]
        if job.sink is None and short is not None:
            warn_of_tables(model, short)

    def _entries(self, files: object) -> Mapping[str, TensorEntry]:
        """Return the checkpoint's tensors by name: the job's, else those in the list `files`."""
        known = self._job.entries
        return entries_of(files if isinstance(files, list) else ()) if known is None else known

    def dense_code_formats(
        self, model: PreTrainedModel, *, on_device: bool
    ) -> dict[str, WeightFormat | None]:
        """Return the formats, by weight, in which linear layers keep the source's codes.

        None for a quantised layer that cannot keep its codes: no format holds them, `dense_dtype`
        is not "auto", or the model's experts are not quantised.
        """
        source = self._job.source
        if source is None:
            return {}
        found = quantised_layers(model, source, self._targets, are_apart=on_device)
        is_auto, store = self.quantization_config.dense_dtype == "auto", self.runtime.store
        keeps_codes = is_auto and (has_quantised_experts(store) or not len(store))
        return found if keeps_codes else dict.fromkeys(found)

    def _expert_formats(
        self, model: PreTrainedModel, names: list[str]
    ) -> dict[str, torch.dtype | ExpertFormat | None]:
        """Return, by module name, the format of the experts in memory; None: the source's dtype."""
        config = self.quantization_config
        source = self._job.source
        if source is not None:
            self._targets = target_names(model, source.weights)
            self._from_source = set(self._targets.values())
        if config.expert_formats is not None:
            if len(config.expert_formats) != len(names):
                where = "config.json names" if self.pre_quantized else "the options name"
                raise ConfigError(
                    f"{where} {len(config.expert_formats)} expert_formats for {len(names)} MoE "
                    "layers; use those that belong to these weights"
                )
            stored = map(parse_expert_dtype, config.expert_formats)
            return dict(zip(names, stored, strict=True))
        if source is not None:
            targets = self._targets
            if config.parsed_expert_dtype is None:
                found = {name: source.expert_format(targets, name) for name in names}
                self._writer.exact = {p for one in found.values() for p in one.coded}
                _warn_of_rounding([one.rounded for one in found.values() if one.rounded])
                return {name: one.format for name, one in found.items()}
        return dict.fromkeys(names, config.parsed_expert_dtype)

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **kwargs: object
    ) -> bool:
        """Tell whether a parameter belongs to the host store, or is quantised in the source."""
        return param_name in self._from_source or self._writer.find(param_name) is not None

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Return 0 for experts: the device's memory is for the dense parts."""
        if self._writer.find(param_name) is not None:
            return 0.0
        return float(super().param_element_size(model, param_name, param))

    def get_new_dtype(self, converter: object, param: Tensor, dtype: torch.dtype) -> object:
        """Return the dtype for a dense part; None for experts, which keep the file's dtype."""
        operations = converter.operations if isinstance(converter, WeightConverter) else ()
        if any(isinstance(op, StoreFused) for op in operations):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def get_quantize_ops(self) -> StoreFused:
        """Return the operation that receives fused experts, and dense weights of a source."""
        return StoreFused(self._writer)

    def rewrite_conversions(self, conversions: list[object]) -> list[object]:
        """Return conversions that store separate experts one by one, without a merge.

        For a packed checkpoint, return only conversions that map packed names to `StorePacked`.
        """
        if self.pre_quantized:
            # Longest first, because Transformers 5.17 also finds "down_proj" in "down_proj_bias".
            names = sorted(TENSOR_NAMES, key=len, reverse=True)
            whole_layer = self._packed_converter([STORED_NAME, STORED_ORDER_NAME], "down_proj")
            return [whole_layer, *(self._packed_converter([name], name) for name in names)]
        conversions = [*conversions, *self._own_conversions]
        for converter in conversions:
            if not isinstance(converter, WeightConverter):
                continue
            targets = (target.rpartition(".")[2] for target in converter.target_patterns)
            if is_expert_merge(converter) and all(name in TENSOR_NAMES for name in targets):
                converter.operations = [StoreExpertwise(self._writer)]
                converter.force_cpu = True
            elif self._job.source is not None:
                converter.operations = [ReadSource(), *converter.operations]
        return conversions

    def _packed_converter(self, stored_names: list[str], target: str) -> WeightConverter:
        sources = [packed_name(name) for name in stored_names]
        operations = [StorePacked(self._writer)]
        return WeightConverter(sources, target, operations=operations, force_cpu=True)

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: object
    ) -> PreTrainedModel:
        if self._writer.error is not None:
            raise self._writer.error
        require_shapes(model, self._shapes)
        runtime = self.runtime
        for module, layer in runtime.bound:
            arrivals = runtime.store[layer].arrivals
            arrivals.require_complete()
            use_experts(module.config, EXPERTS_IMPLEMENTATION)
            keep_elsewhere(module, arrivals.shapes)
        as_offloaded(model, runtime)
        announce_steps(model, runtime)
        if not self.pre_quantized:
            map_ahead(mapped_tensors(model))
            require_finite_weights(model)
        self._job.source = self._job.sink = None  # files may be closed now
        self._targets, self._from_source = {}, set()
        place = place_on(runtime.device, runtime.threads)
        self._writer.dense.put_in(model, runtime.threads, place)
        if self.pre_quantized and not self._job.is_read_afterwards:
            read = partial(map_packed, model, self.quantization_config)
            assemble(model, runtime, self.quantization_config, read)
        else:
            assemble(model, runtime, self.quantization_config)
        if not self.pre_quantized:  # what has not been packed
            copy_out_of_files(model)
        return model

    def is_serializable(self, *args: object, **kwargs: object) -> bool:
        """Raise `ConfigError`: `save_pretrained` would write the empty placeholders."""
        raise ConfigError(
            "save_pretrained cannot write what Tandem keeps; use tandem.save(model, directory)"
        )

    @property
    def is_trainable(self) -> bool:
        """Raise `ConfigError`; on False, Transformers' Trainer would send users to Transformers."""
        raise ConfigError(
            "a model that Tandem computes cannot be trained, nor can adapters on it: no gradients "
            "come through experts and packed layers; train the model as Transformers loads it, "
            "without an OffloadConfig"
        )


def _tied_to(model: PreTrainedModel, name: str) -> str:
    """Return the name of the module whose experts `name` uses: nearly always `name` itself."""
    return tied_weights(model).get(own := f"{name}.down_proj", own).rpartition(".")[0]


def _named(model: PreTrainedModel) -> str:
    return f"{model.config.model_type} ({type(model).__name__})"


def _require_no_experts(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` if the model's config gives a number of experts above 1.

    Must be called only for a model without experts modules. If its config gives such a number, it
    keeps its experts where Tandem cannot replace them.
    """
    # Configs count experts under many names; all of them contain this word.
    values = vars(model.config.get_text_config()).items()
    if max((v for k, v in values if "experts" in k and isinstance(v, int)), default=0) > 1:
        why = why_no_adapter(model.config.model_type) or "Tandem has no adapter for it"
        raise UnsupportedModelError(
            f"{_named(model)} keeps its experts outside Transformers' experts interface, so Tandem "
            f"cannot take them over: {why}; docs/models.md lists the models that run"
        )


def _warn_of_rounding(rounded: list[str]) -> None:
    if rounded:
        more = f" and {len(rounded) - 1} more like it" if len(rounded) > 1 else ""
        warnings.warn(
            f"no packed format holds all of a projection exactly: {rounded[0]}{more} are rounded, "
            "by half a percent of their values; an expert_dtype such as fp16 loses less",
            TandemWarning,
            stacklevel=2,
        )
