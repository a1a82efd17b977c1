"""The sizes of a checkpoint by part, from headers alone, before anything is loaded."""

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tandem.checkpoint.config_values import experts_per_token, value_of
from tandem.checkpoint.sources.source import Source
from tandem.core.errors import ConfigError
from tandem.devices import kind_of
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.forecast.state_bytes import mixer_token_bytes, state_bytes_of
from tandem.foreign_types import PreTrainedConfig
from tandem.hf.checkpoint import AnyCheckpoint, GgufCheckpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.dense_bytes import (
    dense_parts,
    device_bytes,
    embedding_bytes,
    layer_formats,
    short_memory,
)
from tandem.hf.kv_sizes import USUAL_CONTEXT, KvSizes, kv_sizes_of
from tandem.hf.load import (
    empty_model,
    is_widened_on,
    open_foreign,
    require_packed_dtype,
    source_config,
)
from tandem.hf.load_job import LoadJob
from tandem.hf.packed_writer import stored_name
from tandem.hf.quantizer import OffloadQuantizer
from tandem.hf.row_tables import row_tables
from tandem.hf.token_tables import tables_by_token
from tandem.kernels.formats.weight_format import WeightFormat

# Part -> words in the names of the modules whose weights it has; the first match counts.
_PARTS = (
    ("embeddings and head", ("embed", "lm_head", "wte")),
    ("routers", ("gate.", "router")),
    ("attention", ("attn", "attention", "mixer", "conv", "ssm", "mamba")),
    ("shared experts and feed-forward", ("mlp", "feed_forward", "expert", "ffn")),
    ("images and sound", ("visual", "vision", "audio", "image")),
)
_OTHER = "norms and the rest"
_TABLES = "tables of rows"
# Options that a packed checkpoint's files decide, whatever the user asks for.
_OF_FILES = ("expert_dtype", "expert_formats", "dense_formats", "packed_format")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a checkpoint's parts, as loading with certain options gives them.

    Bytes are those of host memory unless a name says otherwise.
    """

    config: PreTrainedConfig
    """The text model's Transformers config."""
    experts_bytes: int
    expert_image_bytes: int
    """Bytes of the largest expert, the size of a slot."""
    expert_formats: tuple[str, ...]
    num_experts: int
    """Experts of all MoE layers together; 0 for a dense model."""
    moe_layers: tuple[int, ...]
    """The indices of the MoE layers among all layers."""
    num_layers: int
    dense_bytes: dict[str, int]
    """Bytes of each dense part, in the formats that the options name."""
    plain_dense_bytes: dict[str, int]
    """Bytes of each dense part if nothing is packed."""
    host_bytes: int
    """Bytes of the dense parts that stay in host memory beside a GPU: embeddings."""
    device_bytes: int
    """Bytes of the dense parts that are on a GPU."""
    dense_layers_with_codes: int
    """The number of linear layers that keep the codes of a quantised checkpoint."""
    dense_format: str
    """The format of most linear layers; "none" if they stay as loaded."""
    dense_layers_without: int
    """The number of linear layers that are quantised in the checkpoint and get dequantised."""
    kv: KvSizes
    """The KV cache's sizes on the CPU."""
    device_kv: KvSizes
    """The KV cache's sizes on a GPU, which stores a latent once."""
    state_bytes: int
    """Bytes of one sequence's states (not keys and values), at any length."""
    are_experts_mapped: bool = False
    """Whether experts stay in the checkpoint's mapped files, without huge pages."""
    disk_table_bytes: int = 0
    """Bytes of tables that stay on the disk; not in `dense_bytes`."""
    by_token: tuple[int, ...] = ()
    """Which MoE layers are routed by token: their numbers, counting MoE layers from 0."""
    mixer_token_bytes: int = 0
    """The most bytes that a token's activations take in a layer with recurrent states."""
    vision: PreTrainedConfig | None = None
    """The config of the vision tower, if the model has one."""

    def within(
        self, available_bytes: int, expert_memory_bytes: int | None, device_bytes: int | None
    ) -> "ModelSizes":
        """Return the sizes, with tables of rows on the disk if memory is too small for them."""
        short = short_memory(
            self.experts_bytes, self.total_dense_bytes, available_bytes,
            expert_memory_bytes=expert_memory_bytes, device_bytes=device_bytes,
        )  # fmt: skip
        if short is None or not (tables := self.dense_bytes.get(_TABLES, 0)):
            return self
        return dataclasses.replace(
            self,
            dense_bytes=_without_tables(self.dense_bytes),
            plain_dense_bytes=_without_tables(self.plain_dense_bytes),
            device_bytes=self.device_bytes - tables,
            disk_table_bytes=tables,
        )

    @property
    def longest_context(self) -> int | None:
        """The longest context that the model supports, in tokens; None if unknown."""
        longest: int | None = value_of(self.config.get_text_config(), "max_position_embeddings")
        return longest

    def context(self, requested: int | None) -> int:
        """Return the context to plan for: the requested one or the usual one, in tokens.

        Raises `ConfigError` if `requested` exceeds the model's longest context.
        """
        longest = self.longest_context
        if requested is not None and longest is not None and requested > longest:
            raise ConfigError(
                f"--context is {requested} tokens, and the model's context has {longest}; give at "
                "most that"
            )
        return requested or min(USUAL_CONTEXT, longest or USUAL_CONTEXT)

    @property
    def num_moe_layers(self) -> int:
        """How many layers hold experts."""
        return len(self.moe_layers)

    @property
    def is_dense(self) -> bool:
        """Whether the model has no experts."""
        return not self.moe_layers

    @property
    def layers_bytes(self) -> int:
        """Bytes of all experts; for a dense model, of its weights."""
        return self.total_dense_bytes if self.is_dense else self.experts_bytes

    @property
    def layer_bytes(self) -> float:
        """Average bytes of one layer's experts; for a dense model, of one layer."""
        return self.layers_bytes / (self.num_layers if self.is_dense else self.num_moe_layers)

    @property
    def top_k(self) -> int:
        """The number of experts per token in each layer."""
        return experts_per_token(self.config)

    @property
    def has_plain_experts(self) -> bool:
        """Whether experts are fp32, in no packed format; such a model runs from memory only."""
        return any(name.startswith("float") for name in self.expert_formats)

    @property
    def total_dense_bytes(self) -> int:
        """Bytes of everything but the experts."""
        return sum(self.dense_bytes.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole model."""
        return self.experts_bytes + self.total_dense_bytes


def model_sizes(checkpoint: AnyCheckpoint, offload: OffloadConfig) -> ModelSizes:
    """Return the sizes of a checkpoint with these options; raises `TandemError` as loading does."""
    if isinstance(checkpoint, GgufCheckpoint) or (
        checkpoint.quantization is not None and not checkpoint.is_packed
    ):
        config, source = open_foreign(checkpoint)
        is_gguf = isinstance(checkpoint, GgufCheckpoint)
        if is_gguf and is_widened_on(offload, source):
            config.dtype = torch.float32
            return config_sizes(config, offload, source, kv_dtype=torch.bfloat16)
        return config_sizes(config, offload, source)
    if checkpoint.is_packed:
        require_packed_dtype(checkpoint, offload)
        stored = OffloadConfig.from_dict(checkpoint.quantization or {})
        of_files = {name: vars(stored)[name] for name in _OF_FILES}
        if stored.dense_dtype != "none":  # otherwise loading packs the dense layers
            of_files["dense_dtype"] = stored.dense_dtype
        offload = dataclasses.replace(offload, **of_files)
    sizes = config_sizes(source_config(checkpoint), offload)
    return dataclasses.replace(sizes, are_experts_mapped=checkpoint.is_packed)


def config_sizes(
    config: PreTrainedConfig,
    offload: OffloadConfig,
    source: Source | None = None,
    *,
    kv_dtype: torch.dtype | None = None,
) -> ModelSizes:
    """Return the sizes of the model that a config describes, with these options.

    `source` reads a checkpoint that another method quantised; None for any other checkpoint.
    `kv_dtype` is the KV cache's dtype; None: the model's dtype.
    """
    model = empty_model(config)
    quantizer = OffloadQuantizer(offload, job=LoadJob(options=offload, source=source))
    quantizer.announce_layers(model)
    on_device = kind_of(offload.device).holds_dense_parts
    codes = quantizer.dense_code_formats(model, on_device=on_device)
    store, text = quantizer.runtime.store, config.get_text_config()
    dtype = next(model.parameters()).dtype
    packed = layer_formats(model, store, offload, codes, on_device=on_device)
    # Tables of a GGUF file are not read row by row from the disk.
    tables = () if source is not None and source.method == "gguf" else row_tables(model)
    dense_bytes = _dense_bytes(model, packed, tables)
    return ModelSizes(
        config=text,
        experts_bytes=store.expected_bytes(dtype),
        expert_image_bytes=max(
            (layer.expected_bytes(dtype) // layer.arrivals.num_experts for layer in store),
            default=0,
        ),
        expert_formats=tuple(dict.fromkeys(_format_name(layer, dtype) for layer in store)),
        num_experts=sum(layer.arrivals.num_experts for layer in store),
        moe_layers=tuple(_layer_number(layer.arrivals.name) for layer in store),
        num_layers=int(value_of(text, "num_hidden_layers") or len(store)),
        dense_bytes=dense_bytes,
        plain_dense_bytes=_dense_bytes(model, {}, tables),
        host_bytes=embedding_bytes(model, packed)[0],
        device_bytes=device_bytes(model, packed),
        dense_layers_with_codes=sum(fmt is not None for fmt in codes.values()),
        dense_format=_most_common(packed),
        dense_layers_without=sum(fmt is None for fmt in codes.values()),
        kv=kv_sizes_of(text, kv_dtype or dtype),
        device_kv=kv_sizes_of(text, kv_dtype or dtype, latents=1),
        state_bytes=state_bytes_of(model),
        mixer_token_bytes=mixer_token_bytes(model),
        vision=value_of(config, "vision_config"),
        by_token=tuple(layer for layer, _ in tables_by_token(model, quantizer.runtime.bound)),
    )


def _most_common(formats: Mapping[str, WeightFormat]) -> str:
    names = Counter(fmt.name for fmt in formats.values())
    return names.most_common(1)[0][0] if names else "none"


def _without_tables(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: num_bytes for name, num_bytes in parts.items() if name != _TABLES}


def _layer_number(name: str) -> int:
    """Return the layer number in an experts module's name; 0 if the name has none."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else 0


def _format_name(layer: HostLayer, dtype: torch.dtype) -> str:
    if isinstance(layer, PackedLayer):
        return stored_name(layer)
    return str(dtype).removeprefix("torch.")


def _dense_bytes(
    model: nn.Module, packed: Mapping[str, WeightFormat], tables: Collection[str]
) -> dict[str, int]:
    """Return the bytes of each dense part; `tables` are the module names of tables of rows."""
    totals = {name: 0 for name, _ in _PARTS} | {_OTHER: 0, _TABLES: 0}
    for name, num_bytes in dense_parts(model, packed):
        part = next((p for p, words in _PARTS if any(w in name for w in words)), _OTHER)
        totals[_TABLES if name.removesuffix(".weight") in tables else part] += num_bytes
    return {part: total for part, total in totals.items() if total}
