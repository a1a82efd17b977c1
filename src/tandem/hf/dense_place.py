"""Where dense parts go: on one device, also if the user lets Transformers choose.

Embeddings stay on the host beside a GPU: of their hundreds of megabytes a step reads a row a token.
"""

import torch
from torch import nn

from tandem.devices import kind_of
from tandem.devices.cuda.embedding import HostEmbedding
from tandem.foreign_types import PreTrainedModel
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import PackedEmbedding, is_packable_embedding

# With these, Transformers would spread a model over GPUs, CPU and disk.
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def device_map_for(config: OffloadConfig, device_map: object) -> object:
    """Return where the dense parts go: what the user says, else the GPU if the options name it."""
    device_map, kind = _on_one_device(config, device_map), kind_of(config.device)
    if device_map is not None or not kind.holds_dense_parts:
        return device_map
    kind.require()
    return {"": 0}


def is_kept_on_host(model: PreTrainedModel, embeddings: nn.Module) -> bool:
    """Whether a model's embeddings can stay on the host: no head on the GPU shares their memory."""
    if isinstance(embeddings, PackedEmbedding):
        return True
    if not is_packable_embedding(embeddings):
        return False
    parameters = model.named_parameters(remove_duplicate=False)
    return sum(p is embeddings.weight for _, p in parameters) == 1


def keep_embeddings_on_host(model: PreTrainedModel) -> None:
    """Bring a model's embeddings to the host, from where each token's are brought to the GPU."""
    embeddings, device = model.get_input_embeddings(), model.device
    if is_kept_on_host(model, embeddings):
        path = next(path for path, module in model.named_modules() if module is embeddings)
        above, _, name = path.rpartition(".")
        setattr(model.get_submodule(above), name, HostEmbedding(embeddings.cpu(), device))


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
