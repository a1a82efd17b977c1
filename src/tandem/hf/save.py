"""`tandem.save`: write a loaded model as a packed checkpoint that loads without conversion."""

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint.packed import DENSE_FILE, experts_file, packed_name, require_new
from tandem.checkpoint.packed_files import write_index, write_tensors
from tandem.core.errors import ModelError
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.foreign_types import PreTrainedConfig, PreTrainedModel, Tokenizer
from tandem.hf.config import PACKED_FORMAT_VERSION, OffloadConfig
from tandem.hf.dense import packed_layers
from tandem.hf.dense_files import dense_formats_of, stored_tensors
from tandem.hf.runtime import Runtime, require_runtime, runtime_of


def save(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Path:
    """Write a model loaded by Tandem, and its tokenizer, to a new directory.

    The directory appears at once when everything is written, or not at all. `on_progress` gets the
    bytes of tensors written so far, after each file; what it raises ends the writing.
    """
    target = Path(directory)
    runtime = runtime_of(model)
    if hasattr(model, "peft_config"):
        raise ModelError(
            "tandem.save got a model with adapters, which packed files do not hold; save them with "
            "save_pretrained, or write model.merge_and_unload()"
        )
    if runtime is None:
        raise ModelError(
            f"tandem.save got a {type(model).__name__} that Tandem did not load; "
            "use its own save_pretrained"
        )
    runtime.require_open()
    require_new(target)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(model, runtime, partial, on_progress or (lambda _: None))
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        partial.replace(target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write(
    model: PreTrainedModel, runtime: Runtime, directory: Path, on_progress: Callable[[int], None]
) -> None:
    files, sums, num_bytes = {}, {}, 0
    for file, tensors in _files(model, runtime):
        sums[file] = write_tensors(directory, file, tensors)
        files[file] = {name: tensor.nbytes for name, tensor in tensors.items()}
        num_bytes += sum(files[file].values())
        on_progress(num_bytes)
    write_index(directory, files, sums)
    write_configs(model, directory)


def write_configs(model: PreTrainedModel, directory: Path) -> None:
    """Write config.json of a packed checkpoint, and the model's generation config."""
    _packed_config(model).save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)


def _files(model: PreTrainedModel, runtime: Runtime) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (file name, tensors): the dense parts, then one file per MoE layer."""
    yield DENSE_FILE, dense_tensors(model, runtime)
    for layer in runtime.store:
        yield experts_file(layer.layer), layer_tensors(layer)


def layer_tensors(layer: HostLayer) -> dict[str, Tensor]:
    """Return what a packed checkpoint holds of a layer, by the names in its file."""
    name = layer.arrivals.name
    return {f"{name}.{packed_name(part)}": tensor for part, tensor in layer.stored().items()}


def dense_tensors(model: PreTrainedModel, runtime: Runtime) -> dict[str, Tensor]:
    """Return the state dict without experts; of tied tensors only the first, loading ties again."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    packed = [path for path, _ in packed_layers(model)]
    experts = {
        f"{name}.{x}" for name, layer in runtime.layers.items() for x in layer.arrivals.shapes
    }
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] in packed or name in experts:
            continue
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor.contiguous()
    return tensors | stored_tensors(model)


def _packed_config(model: PreTrainedModel) -> PreTrainedConfig:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    formats = [stored_name(layer) for layer in require_runtime(model).store]
    dense_dtype, dense_formats = dense_formats_of(model)
    config.quantization_config = OffloadConfig(
        expert_dtype=formats[0] if len(set(formats)) == 1 else "auto",
        dense_dtype=dense_dtype,
        dense_formats=dense_formats or None,
        packed_format=PACKED_FORMAT_VERSION,
        expert_formats=formats if len(set(formats)) > 1 else None,
    )
    if hasattr(config, "transformers_weights"):
        del config.transformers_weights  # set by the quantizer while it loads
    return config


def stored_name(layer: HostLayer) -> str:
    """Name what a layer is kept in, as `expert_dtype` does."""
    if isinstance(layer, PackedLayer):
        return layer.layout.format_name
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in layer.stored().values()}
    return dtypes.pop()
