"""Loads a model's MTP layers from the model's checkpoint, each as a model of one layer.

Transformers drops these weights, or loads them only for its own loop. Here each MTP layer becomes a
one-layer model of the same architecture. Its experts, if any, are in a host store like those of
other models. It shares the embedding and the head with the model for which it drafts.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tandem.checkpoint.config_values import foreign_errors, value_of
from tandem.checkpoint.hub import is_gguf
from tandem.checkpoint.sources.gguf_header import GgufHeader
from tandem.checkpoint.sources.source import Source, SourceTensor
from tandem.checkpoint.weight_report import require_own_weights
from tandem.core.config import from_mapping
from tandem.core.errors import UnsupportedModelError
from tandem.decode.mtp.embedding import GivenHidden, MtpEmbedding
from tandem.decode.mtp.names import GATE_UP_ROWS, JOINING, has_no_norm, mtp_names, why_unknown
from tandem.decode.mtp.streams import StreamedLayer, num_streams
from tandem.devices.cuda.embedding import HostEmbedding
from tandem.devices.cuda.linear import DeviceLinear
from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import Checkpoint, open_checkpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import pack_as_loaded, pack_dense_layers
from tandem.hf.experts import is_experts_module
from tandem.hf.load import class_of, empty_model, open_foreign
from tandem.hf.load_job import LoadJob
from tandem.hf.packed_layers import PackedLinear
from tandem.hf.runtime import require_runtime, runtime_of
from tandem.kernels.dense import CpuThreads

# Options that the MTP layer takes from its model.
_SAME = ("expert_dtype", "dense_dtype", "threads", "isa", "cache_dir")
_DRAFTED_TOKENS = 1 << 15  # of the vocabulary; drafting reads only this part of the head
_REPLACED = ("model.embed_tokens.", "lm_head.")  # the model's own take their place
_FINAL_NORM = "model.norm.weight"
_TOKENS = 1  # of the vocabulary that are loaded; the model's own embeddings replace them


@dataclasses.dataclass(frozen=True, slots=True)
class _StoredLayer:
    """An MTP layer in a checkpoint's files, before it is read."""

    path: Path
    names: Iterable[str]
    """The names of its tensors in the checkpoint."""
    tensors: Callable[[PreTrainedConfig, LoadJob], dict[str, object]]
    """Returns the layer's tensors, by their names in a Transformers model of one layer."""


def load_mtp(
    model: PreTrainedModel, checkpoint: Path | None = None
) -> list[tuple[PreTrainedModel, MtpEmbedding]]:
    """Return each of a model's MTP layers, in order, as a model with its embedding.

    The layers use the model's threads. They are read from `checkpoint`, a directory or a GGUF file,
    or from where the model was loaded. Raises `UnsupportedModelError` if the checkpoint has no MTP
    layer in a known layout.
    """
    path = checkpoint or Path(model.name_or_path)
    layers = (_in_gguf if is_gguf(path) else _in_directory)(model, path)
    return [_load_layer(model, layer, depth) for depth, layer in enumerate(layers)]


def _in_directory(model: PreTrainedModel, path: Path) -> list[_StoredLayer]:
    if not (path / "config.json").exists():
        raise UnsupportedModelError(f"{path} is neither a directory of safetensors nor a GGUF file")
    # The user has already allowed the code of a model that brings its own.
    brings_code = type(model).__module__.startswith("transformers_modules")
    checkpoint = open_checkpoint(path, may_run_code=brings_code)
    count = model.config.get_text_config().num_hidden_layers
    layers = mtp_names(checkpoint.files.entries, count)
    if not layers:
        raise UnsupportedModelError(f"{path} {why_unknown(checkpoint.files.entries, count)}")
    return [_StoredLayer(path, names, partial(_tensors, checkpoint, names)) for names in layers]


def _in_gguf(model: PreTrainedModel, path: Path) -> list[_StoredLayer]:
    from tandem.checkpoint.sources.gguf_mtp import find_mtp, mtp_source  # most loads do not need it

    def tensors(header: GgufHeader, config: PreTrainedConfig, job: LoadJob) -> dict[str, object]:
        shapes = {name: x.shape for name, x in empty_model(config).state_dict().items()}
        job.source = mtp_source(header, shapes, config)
        return job.source.state_dict()

    found = find_mtp(path, model.config.get_text_config().hidden_size)
    return [_StoredLayer(one.file, one.tensors, partial(tensors, one)) for one in found]


def _load_layer(
    model: PreTrainedModel, stored: _StoredLayer, depth: int
) -> tuple[PreTrainedModel, MtpEmbedding]:
    """Load a model's MTP layer at index `depth`; return its one-layer model and the embedding."""
    runtime = require_runtime(model)
    options = dataclasses.asdict(runtime.options)
    offload = from_mapping(OffloadConfig, {name: options[name] for name in _SAME}, where="load_mtp")
    config = _config(model, depth, stored.names)
    head, joining = _loaded(stored, config, offload, model.dtype)
    own = runtime_of(head)
    if own is not None:  # the layer has experts
        own.share(runtime.threads)
    tokens = _without_norm(_on_host(model.get_input_embeddings()))
    embedding = _joined(head, joining, tokens, model.dtype)
    if has_no_norm(stored.names):
        head.get_decoder().norm = nn.Identity()
    head.set_input_embeddings(embedding)
    head.set_output_embeddings(
        first_rows(_head_on_host(model.get_output_embeddings(), runtime.threads))
    )
    pack_dense_layers(head, offload.dense_dtype, runtime.threads)
    pack_as_loaded(head, runtime.threads)
    return head.eval(), embedding


def _joined(
    head: PreTrainedModel, joining: Mapping[str, Tensor], tokens: nn.Module, dtype: torch.dtype
) -> MtpEmbedding:
    """Return the `MtpEmbedding` for `head`, the model of one MTP layer.

    `joining` has the weights of norms and projections, `tokens` is the token embedding. With
    several residual streams, a `StreamedLayer` also replaces the decoder layer of `head`.
    """
    decoder, streams = head.get_decoder(), num_streams(head.config)
    parts: dict[str, nn.Module] = {}
    for name, weight in joining.items():
        part = name.removesuffix(".weight")
        if weight.dim() == 1:
            parts[part] = copy.deepcopy(decoder.norm)
        else:
            rows, cols = weight.shape
            parts[part] = nn.Linear(cols, rows, bias=False, dtype=dtype, device="cpu")
        parts[part].load_state_dict({"weight": weight.to(dtype)})
    given = GivenHidden(streams * head.config.get_text_config().hidden_size, dtype)
    if "fc" in parts:
        if value_of(head.config, "mtp_hidden_states_first"):  # Inkling swaps the columns, too
            weight = parts["fc"].get_parameter("weight")
            weight.data = weight.data.roll(weight.shape[1] // 2, dims=1)
        return MtpEmbedding(tokens, parts["enorm"], parts["hnorm"], parts["fc"], given)
    decoder.layers[0] = StreamedLayer(decoder.layers[0], parts["hnorm"], parts["h_proj"], given)
    return MtpEmbedding(tokens, parts["enorm"], None, parts["e_proj"], given)


def _without_norm(tokens: nn.Module) -> nn.Module:
    """Return a token embedding without its norm, if any; Inkling's MTP layers do not use it."""
    if not hasattr(tokens, "embed_norm"):
        return tokens
    stored: nn.Module = nn.Embedding.from_pretrained(tokens.get_parameter("weight"))
    return stored


def _on_host(module: nn.Module) -> nn.Module:
    """Return a module in host memory, where MTP layers run; a module on a GPU is copied."""
    if isinstance(module, HostEmbedding):
        found: nn.Module = module.on_host
        return found
    is_there = all(x.device.type == "cpu" for x in module.parameters())
    return module if is_there else copy.deepcopy(module).to("cpu")


def _head_on_host(head: nn.Module, threads: CpuThreads) -> nn.Module:
    if not isinstance(head, DeviceLinear):
        return _on_host(head)
    order = None if head.input_order is None else head.input_order.cpu()
    return PackedLinear(head.on_host(), threads, head.dtype, order)


def first_rows(head: nn.Module, most: int = _DRAFTED_TOKENS) -> nn.Module:
    """Return an output head of the first `most` token ids, for drafting, in the memory of `head`.

    Token ids follow the tokenizer's merges, so the first ones are the most frequent. A head that is
    not packed, or has at most `most` rows, is returned unchanged.
    """
    if not isinstance(head, PackedLinear) or head.out_features <= most:
        return head
    weight = head.packed.rows_at(0, most)
    return PackedLinear(weight, head.threads, head.dtype, head.input_order)


def _config(model: PreTrainedModel, depth: int, names: Iterable[str]) -> PreTrainedConfig:
    """Return the config of a model of one MTP layer; `names` are the names of its tensors."""
    text = model.config.get_text_config(decoder=True)
    config = _stated_config(text, depth) or _usual_config(text)
    if num_streams(text) > 1:
        config.layer_types, config.mlp_layer_types = [_compression(names)], ["moe"]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # Transformers refuses two such configs
    config.vocab_size, config.pad_token_id = _TOKENS, None
    config.architectures, config.tie_word_embeddings = None, False
    return config


def _stated_config(text: PreTrainedConfig, depth: int) -> PreTrainedConfig | None:
    """Return the config that Transformers derives for an MTP layer; None if it derives none."""
    if (value_of(text, "num_mtp_layers") or 0) <= depth or not hasattr(text, "get_mtp_config"):
        return None
    try:
        config: PreTrainedConfig = text.get_mtp_config()
    except ValueError:  # the config lists layer types, but not this layer's
        return None
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, name, value[depth : depth + 1])
    config.num_hidden_layers = 1
    return config


def _usual_config(text: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of one MTP layer: with experts and full attention, or as `_OTHERWISE`."""
    config = copy.deepcopy(text)
    config.num_hidden_layers = 1
    for name, value in (_ONE_LAYER | _OTHERWISE.get(text.model_type, {})).items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _compression(names: Iterable[str]) -> str:
    """Return a DeepSeek-V4 layer's type of attention for `layer_types`, from its tensors' names."""
    if any("indexer" in name for name in names):
        return "compressed_sparse_attention"
    has_compressor = any("compressor" in name for name in names)
    return "heavily_compressed_attention" if has_compressor else "sliding_attention"


# Keys of a config that say which layers have experts and which attend.
_ONE_LAYER: dict[str, object] = {
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
# Overrides for models whose MTP layer is of another type that the config does not state.
_OTHERWISE: dict[str, dict[str, object]] = {
    "inkling_text": {"layer_types": ["hybrid"], "mlp_layer_types": ["dense"]},
    "mimo_v2_flash": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
}


def _loaded(
    stored: _StoredLayer, config: PreTrainedConfig, offload: OffloadConfig, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Load an MTP layer as a Transformers model; return it and the tensors named in `JOINING`."""
    job = LoadJob(options=offload)
    state = stored.tensors(config, job)
    module = empty_model(config)
    if any(is_experts_module(part) for part in module.modules()):
        mine = {"quantization_config": offload}
    else:
        mine, state = {}, _taken_apart({name: _values(x) for name, x in state.items()})
    joining = {n: _values(state.pop(n)) for n in list(state) if n.startswith(JOINING)}
    replaced = _REPLACED + ((_FINAL_NORM,) if has_no_norm(stored.names) else ())
    for name, weight in module.state_dict().items():
        if name.startswith(replaced):
            state[name] = torch.zeros(weight.shape, dtype=dtype, device="cpu")
    what = f"Transformers cannot load the MTP layer of {stored.path}"
    with foreign_errors(what), job.under_way():
        head, report = class_of(config).from_pretrained(
            None, config=config, state_dict=state, dtype=dtype,
            output_loading_info=True, ignore_mismatched_sizes=True, **mine,
        )  # fmt: skip
    require_own_weights(stored.path, head, report, is_whole=False)
    return head, joining


def _taken_apart(state: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the tensors with each interleaved gate and up projection split into two tensors."""
    apart: dict[str, object] = {}
    for name, values in state.items():
        if GATE_UP_ROWS not in name:
            apart[name] = values
            continue
        for first, part in enumerate(("gate_proj", "up_proj")):
            apart[name.replace("gate_up_rows", part)] = values[first::2].contiguous()
    return apart


def _tensors(
    checkpoint: Checkpoint, names: Mapping[str, str], config: PreTrainedConfig, job: LoadJob
) -> dict[str, object]:
    """Return the tensors in `names` by their new names, in the form that Transformers accepts."""
    if checkpoint.quantization is None:
        return {new: checkpoint.files.slice_of(old) for old, new in names.items()}
    source = open_foreign(checkpoint)[1]
    plain = {names[old]: x for old, x in source.plain.items() if old in names}
    weights = {names[old]: x for old, x in source.weights.items() if old in names}
    job.source = Source(source.method, weights, plain)
    return job.source.state_dict()


def _values(stored: Any) -> Tensor:
    values: Tensor = stored.values() if isinstance(stored, SourceTensor) else stored[:]
    return values
