"""`tandem.load`: open a checkpoint with its experts in host memory."""

import re
from pathlib import Path
from typing import Any

import torch
import transformers

from tandem.core.config import from_mapping
from tandem.core.errors import ConfigError, ModelError, TandemError
from tandem.hf.checkpoint import check_checkpoint
from tandem.hf.config import OffloadConfig, parse_dense_dtype, parse_dtype

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load(
    model: str | Path, *, dtype: str | torch.dtype = "auto", device_map: Any = None, **options: Any
) -> Any:
    """Load a checkpoint directory (or hub id) with its experts in host memory.

    `dtype` is that of the dense parts ("auto": the checkpoint's); `dense_dtype` among the options
    packs their linear layers. `options` are the fields of `OffloadConfig`. Returns the Transformers
    model; raises `TandemError` for what a user can mend.
    """
    offload = from_mapping(OffloadConfig, options, where="tandem.load")
    model_dtype = parse_dtype(dtype, field="dtype") or "auto"
    source = str(model)
    if Path(model).is_dir():
        config = check_checkpoint(Path(model))
        # A packed checkpoint says itself how its experts are stored.
        is_packed = "quantization_config" in config
        if is_packed:
            _check_packed_dtype(source, config["quantization_config"], offload)
    elif _HUB_ID.fullmatch(source) and not Path(model).parent.is_dir():
        config, is_packed = {}, False
    else:
        raise ModelError(f"{source} is not a directory; expected a model directory or a hub id")
    loader = _model_class(config)
    kwargs = {} if is_packed else {"quantization_config": offload}
    try:
        loaded, report = loader.from_pretrained(
            source, dtype=model_dtype, device_map=device_map, output_loading_info=True, **kwargs
        )
    except TandemError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(f"Transformers cannot load {source}: {first_line}") from error
    _require_all_weights(source, report)
    if is_packed:
        loaded.hf_quantizer.assemble(loaded, offload)
    return loaded.eval()


def _check_packed_dtype(source: str, packed: dict[str, Any], offload: OffloadConfig) -> None:
    stored = packed.get("expert_dtype", "auto")
    if offload.expert_dtype not in ("auto", stored):
        raise ConfigError(
            f"{source} is packed with expert_dtype {stored!r} and cannot be loaded as "
            f"{offload.expert_dtype!r}; load the original checkpoint for that"
        )
    dense = parse_dense_dtype(packed.get("dense_dtype", "none"))
    wanted = parse_dense_dtype(offload.dense_dtype)
    if dense is not None and wanted not in (None, dense) and offload.dense_dtype != "auto":
        raise ConfigError(
            f"{source} is packed with dense_dtype {dense.name!r} and cannot be loaded as "
            f"{offload.dense_dtype!r}; load the original checkpoint for that"
        )


def _model_class(config: dict[str, Any]) -> Any:
    """Return the class that config.json names: it keeps multimodal wrappers whole."""
    for name in config.get("architectures") or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM


def _require_all_weights(source: str, report: dict[str, Any]) -> None:
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of the model's weights, the first is {missing[0]}; "
            "download the missing files again"
        )
