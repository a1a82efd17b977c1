"""Moves the dense parts to their device once a checkpoint has been read.

Transformers gets no device map, because with a device map it would require Accelerate, and move
fused experts to the device before they are packed. Beside a GPU, embeddings stay on the host: of
their hundreds of megabytes, a step reads one row per token.
"""

import torch
from torch import Tensor, nn

from tandem.checkpoint.mapped_files import copy_out_of_files
from tandem.core.errors import ConfigError
from tandem.devices import kind_of
from tandem.devices.cuda.embedding import HostEmbedding
from tandem.devices.cuda.streams import memory_of
from tandem.foreign_types import PreTrainedModel
from tandem.hf.config import OffloadConfig
from tandem.hf.packed_layers import PackedEmbedding, is_packable_embedding

# With one of these, Transformers would distribute the model over GPUs, CPU and disk.
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def dense_device(config: OffloadConfig, device_map: object) -> torch.device:
    """Return the device of the dense parts: from `device_map`; if that is None, from `config`.

    Raises `ConfigError` if `device_map` names several devices, or none that can hold the dense
    parts, and `CapacityError` if the GPU is missing.
    """
    places = _places(config, device_map)
    devices = {_find_device(place) for place in places}
    names = ", ".join(sorted(map(str, places)))
    if len(devices) > 1:
        raise ConfigError(
            f"device_map spreads the model over {names}; with Tandem the dense parts live on "
            "one device and the experts in host memory, so pass a single device"
        )
    (device,) = devices
    if device is None:
        raise ConfigError(
            f"device_map names {names!r}, which cannot hold the dense parts; pass a single device, "
            "such as 'cuda' or 'cpu'"
        )
    if device.type == "cuda":
        kind_of("cuda").require()
    return device


def free_device_bytes(device: torch.device) -> int:
    """Return a GPU's free bytes."""
    return memory_of(device).free_bytes


def move_dense_parts(model: nn.Module, device: torch.device) -> None:
    """Move all parameters and buffers to a device, each once, so that tied tensors stay tied."""
    # Keeps the originals, so that their ids stay unique.
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def there(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            value = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                value = type(tensor)(value, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = (tensor, value)
        return moved[id(tensor)][1]

    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in [*parameters, *buffers]:
            if tensor.device != device:
                setattr(module, name, there(tensor))


def is_kept_on_host(model: PreTrainedModel, embeddings: nn.Module) -> bool:
    """Whether a model's embeddings can stay on the host: no head on the GPU shares their memory."""
    if isinstance(embeddings, PackedEmbedding):
        return True
    if not is_packable_embedding(embeddings):
        return False
    parameters = model.named_parameters(remove_duplicate=False)
    return sum(p is embeddings.weight for _, p in parameters) == 1


def keep_embeddings_on_host(model: PreTrainedModel, device: torch.device) -> None:
    """Keep embeddings on the host if possible; a call will copy its tokens' rows to `device`."""
    embeddings = model.get_input_embeddings()
    if is_kept_on_host(model, embeddings):
        copy_out_of_files(embeddings)
        path = next(path for path, module in model.named_modules() if module is embeddings)
        above, _, name = path.rpartition(".")
        setattr(model.get_submodule(above), name, HostEmbedding(embeddings.cpu(), device))


def _places(config: OffloadConfig, device_map: object) -> set[object]:
    """Return the places that a device map names; without a map, the place that `config` implies.

    "auto" and the like mean the GPU, or the CPU if there is no GPU. In both
    cases an emulated device has the CPU as its place: the device reads the model's state in host
    memory.
    """
    if isinstance(device_map, str) and device_map in _AUTOMATIC:
        has_gpu = config.device == "cpu" and torch.cuda.is_available()
        device_map = torch.cuda.current_device() if has_gpu else None
    if isinstance(device_map, dict):
        return set(device_map.values()) or {"cpu"}
    if device_map is None:
        return {0} if kind_of(config.device).holds_dense_parts else {"cpu"}
    return {device_map}


def _find_device(place: object) -> torch.device | None:
    """Return the device that an entry of a device map names, a GPU with its index.

    Returns None for the meta device, and if the entry names no device.
    """
    try:
        if isinstance(place, int) and not isinstance(place, bool):
            return torch.device("cuda", place)
        found = torch.device(place)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        return None
    if found.type == "meta":
        return None
    has_index = found.type != "cuda" or found.index is not None
    return found if has_index else torch.device("cuda", 0)
