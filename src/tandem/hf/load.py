"""`tandem.load`: open a checkpoint with its experts in host memory."""

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from tandem.core.config import from_mapping
from tandem.core.errors import ConfigError, ModelError, TandemError
from tandem.core.units import format_bytes
from tandem.hf.checkpoint import Checkpoint, open_checkpoint
from tandem.hf.config import OffloadConfig, parse_dense_dtype, parse_dtype, parse_expert_dtype
from tandem.hf.cuda_machine import device_map_for
from tandem.hf.hub import HubOptions, find_directory
from tandem.hf.mapped_files import read_ahead
from tandem.hf.sources.gguf import open_gguf
from tandem.hf.sources.source import Source, open_source
from tandem.offload.host_memory import available_bytes

# A GGUF file's matrices are in blocks; it has no dtype of its own.
GGUF_DENSE_DTYPE = torch.bfloat16


def load(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    hub_cache: str | Path | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Load a checkpoint directory (or hub id) with its experts in host memory.

    `dtype` is that of the dense parts ("auto": the checkpoint's); `dense_dtype` among the options
    packs their linear layers. Experts that are quantised in the checkpoint keep their codes, unless
    the options name an `expert_dtype`. `revision`, `token` and `hub_cache` (a directory) are for a
    hub id; code that comes with a model runs only with `trust_remote_code`. `options` are the
    fields of `OffloadConfig`. Returns the Transformers model; raises `TandemError` for what a user
    can mend.
    """
    offload = from_mapping(OffloadConfig, options, where="tandem.load")
    model_dtype = parse_dtype(dtype, field="dtype") or "auto"
    hub = HubOptions(
        revision, token, None if hub_cache is None else str(hub_cache), trust_remote_code
    )
    if str(model).endswith(".gguf") and Path(model).is_file():
        return _load_gguf(Path(model), offload, dtype=model_dtype, device_map=device_map)
    directory = find_directory(model, hub)
    checkpoint = open_checkpoint(directory, may_run_code=trust_remote_code)
    return load_checkpoint(
        checkpoint,
        offload,
        dtype=model_dtype,
        device_map=device_map,
    )


def load_checkpoint(
    checkpoint: Checkpoint,
    offload: OffloadConfig,
    *,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    num_layers: int | None = None,
) -> Any:
    """Load a checkpoint whose files have been checked; arguments as of `load`.

    `num_layers` loads the first layers only, for checks.
    """
    directory = checkpoint.directory
    device_map = device_map_for(offload, device_map)
    if checkpoint.is_packed:
        _check_packed_dtype(checkpoint, offload)
    source = None
    if checkpoint.quantization is not None and not checkpoint.is_packed:
        source = open_source(checkpoint.files, checkpoint.quantization)
    try:
        loaded, report = _from_pretrained(
            checkpoint,
            source,
            offload,
            dtype=dtype,
            device_map=device_map,
            num_layers=num_layers,
        )
    except TandemError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(f"Transformers cannot load {directory}: {first_line}") from error
    _require_all_weights(directory, report)
    if checkpoint.is_packed:
        if num_layers is None:
            _read_packed_files(checkpoint)
        loaded.hf_quantizer.assemble(loaded, offload)
    return loaded.eval()


def _read_packed_files(checkpoint: Checkpoint) -> None:
    """Bring a packed checkpoint's files into memory if they fit; else pages come when used."""
    files = sorted({entry.file for entry in checkpoint.files.entries.values()})
    total, available = sum(file.stat().st_size for file in files), available_bytes()
    if total > available:
        warnings.warn(
            f"{checkpoint.directory} has {format_bytes(total)} and {format_bytes(available)} of "
            "memory are free: experts are read from the disk whenever they are used, which is "
            "slow; free memory or pack it in a smaller expert_dtype",
            stacklevel=3,
        )
        return
    is_shown = logging.is_progress_bar_enabled()
    with tqdm(
        total=total, desc="Reading files", unit="B", unit_scale=True, disable=not is_shown
    ) as bar:
        read_ahead(files, bar.update)


def _from_pretrained(
    checkpoint: Checkpoint,
    source: Source | None,
    offload: OffloadConfig,
    *,
    dtype: Any,
    device_map: Any,
    num_layers: int | None,
) -> tuple[Any, dict[str, Any]]:
    """Let Transformers load; returns the model and what it reports."""
    directory = str(checkpoint.directory)
    common = {"dtype": dtype, "device_map": device_map, "output_loading_info": True}
    if source is None:
        # A packed checkpoint says itself how its experts are stored.
        mine: dict[str, Any] = {} if checkpoint.is_packed else {"quantization_config": offload}
        if _runs_code(checkpoint):
            mine["trust_remote_code"] = True
        if num_layers is not None:
            mine["config"] = _own_config(checkpoint)
            keep_first_layers(mine["config"], num_layers)
        loader = model_class(checkpoint.config)
        result: tuple[Any, dict[str, Any]] = loader.from_pretrained(directory, **mine, **common)
        return result
    config = source_config(checkpoint)
    if num_layers is not None:
        keep_first_layers(config, num_layers)
    loaded, report = _from_source(source, config, offload, **common)
    loaded.name_or_path = loaded.config._name_or_path = directory
    if (checkpoint.directory / "generation_config.json").exists():
        loaded.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return loaded, report


def _from_source(source: Source, config: Any, offload: OffloadConfig, **common: Any) -> Any:
    """Let Transformers load weights that only we read; returns the model and what it reports."""
    offload.source = source
    return class_of(config).from_pretrained(
        None,
        config=config,
        state_dict=source.state_dict(),
        quantization_config=offload,
        **common,
    )


def _load_gguf(file: Path, offload: OffloadConfig, *, dtype: Any, device_map: Any) -> Any:
    """Load a GGUF file, whose dense parts are in `dtype` or, if that is "auto", the default."""
    config, source = open_gguf(file, empty_model)
    dtype = GGUF_DENSE_DTYPE if dtype == "auto" else dtype
    loaded, report = _from_source(
        source, config, offload, dtype=dtype, device_map=device_map, output_loading_info=True
    )
    loaded.name_or_path = loaded.config._name_or_path = str(file)
    _require_all_weights(file, report)
    return loaded.eval()


def class_of(config: Any) -> Any:
    """Return the class of a config's whole model: the one that it names, or the causal one."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    code = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if code is not None and type(config).__module__.startswith("transformers_modules"):
        # The config's class is the model's own already, so the user lets its code run.
        return get_class_from_dynamic_module(code, config._name_or_path)
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def empty_model(config: Any) -> Any:
    """Build a config's model without memory; raises `ModelError`."""
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = class_of(config)(config)
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"Transformers cannot build a {config.model_type} from its config: {first_line}"
        ) from error
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    return model


def keep_first_layers(config: Any, num_layers: int) -> None:
    """Cut a config's text model to its first layers, and its lists of one entry per layer."""
    text = config.get_text_config()
    total = text.num_hidden_layers
    text.num_hidden_layers = min(num_layers, total)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == total:
            setattr(text, name, value[: text.num_hidden_layers])


def _runs_code(checkpoint: Checkpoint) -> bool:
    """Whether the model's own code runs: it brings some, and the user lets it."""
    return checkpoint.may_run_code and "auto_map" in checkpoint.config


def _own_config(checkpoint: Checkpoint) -> Any:
    return transformers.AutoConfig.from_pretrained(
        checkpoint.directory, trust_remote_code=_runs_code(checkpoint)
    )


def source_config(checkpoint: Checkpoint) -> Any:
    """Return Transformers' config of a checkpoint as if it were not quantised."""
    config = _own_config(checkpoint)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # Transformers refuses two
    return config


def _check_packed_dtype(checkpoint: Checkpoint, offload: OffloadConfig) -> None:
    packed = checkpoint.quantization or {}
    stored = packed.get("expert_dtype", "auto")
    wanted_experts = offload.parsed_expert_dtype
    if wanted_experts not in (None, parse_expert_dtype(stored)):
        raise ConfigError(
            f"{checkpoint.directory} is packed with expert_dtype {stored!r} and cannot be loaded "
            f"as {offload.expert_dtype!r}; load the original checkpoint for that"
        )
    dense = parse_dense_dtype(packed.get("dense_dtype", "none"))
    wanted = parse_dense_dtype(offload.dense_dtype)
    if dense is not None and wanted not in (None, dense) and offload.dense_dtype != "auto":
        raise ConfigError(
            f"{checkpoint.directory} is packed with dense_dtype {dense.name!r} and cannot be "
            f"loaded as {offload.dense_dtype!r}; load the original checkpoint for that"
        )


def model_class(config: dict[str, Any]) -> Any:
    """Return the class that config.json names: it keeps multimodal wrappers whole."""
    for name in config.get("architectures") or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM


def _require_all_weights(directory: Path, report: dict[str, Any]) -> None:
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{directory} lacks {len(missing)} of the model's weights, the first is {missing[0]}; "
            "download the missing files again"
        )
