"""`tandem.load`: open a checkpoint with its experts in host memory."""

import dataclasses
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tandem.checkpoint.config_sizes import counted_build, require_layers
from tandem.checkpoint.config_values import foreign_errors, require_top_k, value_of
from tandem.checkpoint.gguf_choice import sibling_projectors
from tandem.checkpoint.hub import HubOptions, find_model_path
from tandem.checkpoint.mapped_files import reading_along
from tandem.checkpoint.packed import is_dense_file
from tandem.checkpoint.sources.source import Source, open_source
from tandem.checkpoint.weight_report import LoadReport, require_own_weights
from tandem.core.config import from_mapping
from tandem.core.errors import ConfigError, ModelError, TandemWarning, capacity_errors
from tandem.experts.store.host_memory import available_bytes
from tandem.foreign_types import PreTrainedConfig, PreTrainedModel
from tandem.hf.adapters import put_on_interface, text_class
from tandem.hf.assembly import assemble
from tandem.hf.checkpoint import AnyCheckpoint, Checkpoint, GgufCheckpoint, open_model
from tandem.hf.compat import NEWEST_TESTED, choose_no_implementation, untested_version
from tandem.hf.config import OffloadConfig, parse_dense_dtype, parse_dtype, parse_expert_dtype
from tandem.hf.dense_place import dense_device
from tandem.hf.importance import with_importance_file
from tandem.hf.load_job import LoadJob
from tandem.hf.packed_reading import read_packed, verify_files
from tandem.hf.packed_writer import LayerSink
from tandem.hf.runtime import require_runtime
from tandem.kernels.formats.weight_format import formats_of


def load(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device_map: object = None,
    revision: str | None = None,
    token: str | bool | None = None,
    hub_cache: str | Path | None = None,
    trust_remote_code: bool = False,
    verify: bool = False,
    **options: object,
) -> PreTrainedModel:
    """Load a checkpoint directory, GGUF file or hub id with its experts in host memory.

    `dtype` is that of the dense parts. "auto" is the checkpoint's dtype; for a GGUF file with few
    bits it is fp32, with keys and values in bf16, if the CPU computes everything and `dense_dtype`
    is given. `dense_dtype`, one of the options, packs the dense parts' linear layers. Experts that
    are quantised in the checkpoint keep their codes, unless the options name an `expert_dtype`.
    `revision`, `token` and `hub_cache` (a directory) are for a hub id. Code that comes with a model
    runs only with `trust_remote_code`. `verify` first compares a packed checkpoint's files with
    their checksums, and refuses a checkpoint without checksums. `options` are the fields of
    `OffloadConfig`. Returns the Transformers model; raises `TandemError` for errors that a user can
    mend.
    """
    offload = from_mapping(OffloadConfig, options, where="tandem.load")
    model_dtype = parse_dtype(dtype, field="dtype") or "auto"
    hub = HubOptions(
        revision, token, None if hub_cache is None else str(hub_cache), trust_remote_code
    )
    with capacity_errors():
        checkpoint = open_model(find_model_path(model, hub), may_run_code=trust_remote_code)
        if verify and not verify_files(checkpoint):
            raise ModelError(
                f"{checkpoint.path} has no checksums to verify; expected files that tandem pack "
                "has written; load it without verify, or pack it"
            )
        return load_checkpoint(checkpoint, offload, dtype=model_dtype, device_map=device_map)


def load_checkpoint(
    checkpoint: AnyCheckpoint,
    offload: OffloadConfig,
    *,
    dtype: str | torch.dtype = "auto",
    device_map: object = None,
    num_layers: int | None = None,
    sink: LayerSink | None = None,
) -> PreTrainedModel:
    """Load a checkpoint whose files have been checked; arguments are as in `load`.

    `num_layers` loads only the first layers, for checks. A `sink` receives the experts, layer by
    layer.
    """
    for why in filter(None, map(untested_version, NEWEST_TESTED)):
        warnings.warn(why, TandemWarning, stacklevel=3)
    if checkpoint.is_packed:
        require_packed_dtype(checkpoint, offload)
    else:
        offload.require_no_slots(str(checkpoint.path))
    offload = with_importance_file(offload, checkpoint)
    job = LoadJob(
        options=offload, sink=sink, device=dense_device(offload, device_map),
        entries=checkpoint.files.entries if isinstance(checkpoint, Checkpoint) else {},
        is_read_afterwards=checkpoint.is_packed,
    )  # fmt: skip
    common: dict[str, object] = {
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # mismatched tensors are reported, and then refused
    }
    with foreign_errors(f"Transformers cannot load {checkpoint.path}"), job.under_way():
        if _is_read_by_transformers(checkpoint):
            with reading_along(files_read_along(checkpoint, num_layers)):
                loaded, report = _from_pretrained(checkpoint, job, num_layers, common)
        else:
            loaded, report = _from_source(checkpoint, job, num_layers, common)
    require_own_weights(checkpoint.path, loaded, report, is_whole=num_layers is None)
    if checkpoint.is_packed:
        again = partial(assemble, loaded, require_runtime(loaded), offload)
        if num_layers is None:
            read_packed(checkpoint, loaded, offload, again)
        else:
            again()
    return loaded.eval()


def files_read_along(checkpoint: Checkpoint, num_layers: int | None = None) -> list[Path]:
    """Return the files to read ahead while a model loads.

    The list is empty if `num_layers` is given, or if the files exceed free memory. It lacks the
    experts of a packed checkpoint, which are read later, into slots or the page cache.
    """
    files = checkpoint.weight_files
    if checkpoint.is_packed:
        files = [file for file in files if is_dense_file(file)]
    num_bytes = sum(file.stat().st_size for file in files)
    return files if num_layers is None and num_bytes <= available_bytes() else []


def _is_read_by_transformers(checkpoint: AnyCheckpoint) -> TypeGuard[Checkpoint]:
    """Whether Transformers can read the weights: they are not quantised, or Tandem packed them."""
    if not isinstance(checkpoint, Checkpoint):
        return False
    return checkpoint.is_packed or checkpoint.quantization is None


def _from_pretrained(
    checkpoint: Checkpoint, job: LoadJob, num_layers: int | None, common: dict[str, object]
) -> tuple[PreTrainedModel, LoadReport]:
    """Let Transformers load weights that it can read; return the model and the load report."""
    # A packed checkpoint's config says how its experts are stored.
    mine: dict[str, object] = {} if checkpoint.is_packed else {"quantization_config": job.options}
    config = own_config(checkpoint)
    if num_layers is not None:
        keep_first_layers(config, num_layers)
    mine |= {"config": config, "trust_remote_code": checkpoint.runs_code}
    named = _named_class(checkpoint.config.get("architectures"))
    loader = named or text_class(config.model_type) or transformers.AutoModelForCausalLM
    result: tuple[PreTrainedModel, LoadReport] = loader.from_pretrained(
        str(checkpoint.directory), local_files_only=not checkpoint.runs_code,
        use_safetensors=True, **mine, **common,
    )  # fmt: skip
    return result


def _from_source(
    checkpoint: AnyCheckpoint, job: LoadJob, num_layers: int | None, common: dict[str, object]
) -> tuple[PreTrainedModel, LoadReport]:
    """Let Transformers load weights that Tandem reads; return the model and the load report."""
    config, source = open_foreign(checkpoint, num_layers)
    is_widened = False
    if isinstance(checkpoint, GgufCheckpoint):
        _name_projectors(checkpoint.path)
        if common["dtype"] == "auto":
            common["dtype"] = config.dtype
            is_widened = job.sink is None and is_widened_on(job.options, source, job.device)
            if is_widened:
                common["dtype"] = torch.float32
    job.source = source
    loaded, report = class_of(config).from_pretrained(
        None,
        config=config,
        state_dict=source.state_dict(),
        quantization_config=job.options,
        **common,
    )
    if is_widened:
        require_runtime(loaded).kv_dtype = "bf16"
    loaded.name_or_path = loaded.config.name_or_path = str(checkpoint.path)
    if (checkpoint.path / "generation_config.json").exists():
        loaded.generation_config = transformers.GenerationConfig.from_pretrained(checkpoint.path)
    return loaded, report


def is_widened_on(
    offload: OffloadConfig, source: Source, dense_place: torch.device | None = None
) -> bool:
    """Whether a GGUF file's model computes in fp32 by default, as llama.cpp does.

    If experts and linear layers have few bits, fp32 enlarges little except the values between
    layers; 16-bit weights would double. In bf16, errors of the first token, whose values are the
    largest by far, spread to all other tokens.
    """
    is_on_gpu = dense_place is not None and dense_place.type != "cpu"
    if offload.dense_dtype == "none" or offload.device != "cpu" or is_on_gpu:
        return False
    expert_dtype = offload.parsed_expert_dtype
    if expert_dtype is None:
        return bool(source.weights) and not source.plain_experts
    return not isinstance(expert_dtype, torch.dtype) and formats_of(expert_dtype)[0].bits <= 8


def _name_projectors(file: Path) -> None:
    """Warn if projector files for images or sound are beside a GGUF file: they are not read."""
    if found := sibling_projectors(file):
        warnings.warn(
            f"{found[0].name} beside {file.name} reads images or sound for this model, and Tandem "
            "does not read it: the model takes only text; for images load its safetensors",
            TandemWarning,
            stacklevel=4,
        )


def open_foreign(
    checkpoint: AnyCheckpoint, num_layers: int | None = None
) -> tuple[PreTrainedConfig, Source]:
    """Return the config and the weights of a GGUF file, or of an unpacked quantised checkpoint.

    The config is as if the checkpoint were not quantised; `num_layers`, if given, keeps only the
    first layers. Raises `UnsupportedModelError`.
    """

    def adapt(config: PreTrainedConfig) -> None:
        if num_layers is not None:
            keep_first_layers(config, num_layers)

    if isinstance(checkpoint, GgufCheckpoint):
        from tandem.checkpoint.sources.gguf import open_gguf  # most loads do not need it

        return open_gguf(checkpoint.path, empty_model, adapt=adapt)
    assert checkpoint.quantization is not None
    with foreign_errors(f"{checkpoint.directory} has a quantization_config that cannot be read"):
        source = open_source(checkpoint.files, checkpoint.quantization)
    config = source_config(checkpoint)
    adapt(config)
    return config, source


def class_of(config: PreTrainedConfig) -> Any:
    """Return the class that a config's `architectures` names, else the causal LM of its type."""
    named = _named_class(value_of(config, "architectures"))
    if named is not None:
        return named
    code = (value_of(config, "auto_map") or {}).get("AutoModelForCausalLM")
    if code is not None and type(config).__module__.startswith("transformers_modules"):
        # The config's class is from the model's own code, so the user has allowed that code.
        return get_class_from_dynamic_module(code, config.name_or_path)
    return text_class(config.model_type) or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a config's model on the meta device, with Tandem's adapters; raises `ModelError`."""
    model = _as_transformers(config)
    put_on_interface(model)
    return model


def _as_transformers(config: PreTrainedConfig) -> PreTrainedModel:
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    what = f"Transformers cannot build a {config.model_type} from its config"
    try:
        with foreign_errors(what), torch.device("meta"):
            model = class_of(config)(config)
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    return model


def keep_first_layers(config: PreTrainedConfig, num_layers: int) -> None:
    """Cut a config's text part, also its lists per layer, to the first `num_layers` layers."""
    text = config.get_text_config()
    name = _name_of_count(text)
    total = value_of(text, name)
    kept = min(num_layers, total)
    setattr(text, name, kept)  # no effect if the count is the length of a list
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == total:
            setattr(text, name, value[:kept])


def _name_of_count(text: PreTrainedConfig) -> str:
    """Return the config attribute that holds the number of layers, as tensor names number them.

    This is `num_hidden_layers` except for LongCat, whose `num_hidden_layers` counts attentions, two
    for each layer, and whose `num_layers` counts the layers.
    """
    declared = {field.name for field in dataclasses.fields(text)}
    return "num_layers" if "num_layers" in declared else "num_hidden_layers"


def own_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return a checkpoint's config; `ModelError` if its model needs more tensors than there are.

    Attention and experts functions that the config names are ignored: Transformers would fetch
    missing ones from the hub.
    """
    config = transformers.AutoConfig.from_pretrained(
        checkpoint.directory,
        trust_remote_code=checkpoint.runs_code,
        local_files_only=not checkpoint.runs_code,
    )
    choose_no_implementation(config)
    if not checkpoint.runs_code:  # a model's own code may do anything
        _require_size(checkpoint, config)
    return config


def _require_size(checkpoint: Checkpoint, config: PreTrainedConfig) -> None:
    """Raise `ModelError` if a checkpoint's tensors are too few for the model of a config.

    Builds the model on the meta device, to count its weights.
    """
    where, held = f"{checkpoint.directory}/config.json", checkpoint.held
    text = config.get_text_config()
    require_top_k(where, text.to_dict())  # including keys that the file omits
    require_layers(where, value_of(text, _name_of_count(text)), held)
    with counted_build(where, checkpoint.config, held):
        _as_transformers(config)


def source_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return Transformers' config of a checkpoint as if it were not quantised."""
    config = own_config(checkpoint)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # Transformers refuses two such configs
    return config


def require_packed_dtype(checkpoint: Checkpoint, offload: OffloadConfig) -> None:
    """Raise `ConfigError` if options name a format that differs from that of the packed files."""
    packed = checkpoint.quantization or {}
    stored = packed.get("expert_dtype", "auto")
    requested_experts = offload.parsed_expert_dtype
    if requested_experts not in (None, parse_expert_dtype(stored)):
        raise ConfigError(
            f"{checkpoint.directory} is packed with expert_dtype {stored!r} and cannot be loaded "
            f"as {offload.expert_dtype!r}; load the original checkpoint for that"
        )
    dense = parse_dense_dtype(packed.get("dense_dtype", "none"))
    requested = parse_dense_dtype(offload.dense_dtype)
    if dense is not None and requested not in (None, dense) and offload.dense_dtype != "auto":
        raise ConfigError(
            f"{checkpoint.directory} is packed with dense_dtype {dense.name!r} and cannot be "
            f"loaded as {offload.dense_dtype!r}; load the original checkpoint for that"
        )


def _named_class(architectures: Iterable[str] | None) -> type[PreTrainedModel] | None:
    """Return the first class of `architectures` that Transformers has; None: it has no such class.

    A config names the class of the whole model, so that multimodal models stay whole.
    """
    names = (name for name in architectures or () if hasattr(transformers, name))
    return next((getattr(transformers, name) for name in names), None)
