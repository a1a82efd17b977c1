"""Where dense parts go: whole on one device, also if the user lets Transformers choose."""

import torch

from tandem.devices import kind_of
from tandem.hf.config import OffloadConfig

# With these, Transformers would spread a model over GPUs, CPU and disk.
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def device_map_for(config: OffloadConfig, device_map: object) -> object:
    """Return where the dense parts go: what the user says, else the GPU if the options name it."""
    device_map, kind = _on_one_device(config, device_map), kind_of(config.device)
    if device_map is not None or not kind.holds_dense_parts:
        return device_map
    kind.require()
    return {"": 0}


def _on_one_device(config: OffloadConfig, device_map: object) -> object:
    """Return the user's device map; in place of one that chooses, the GPU if there is one.

    None leaves it to the options: the GPU if they name it, else the CPU. An emulated device reads
    the model's state in host memory, so its dense parts stay there.
    """
    if not isinstance(device_map, str) or device_map not in _AUTOMATIC:
        return device_map
    if config.device == "cpu" and torch.cuda.is_available():
        return {"": torch.cuda.current_device()}
    return None
