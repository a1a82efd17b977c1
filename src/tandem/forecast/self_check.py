"""Compares the kernels with the reference on a few layers of a model, on this machine.

Both read the same packed weights, so only the arithmetic differs: the kernels round activations to
int8.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.decode.finite_logits import require_finite_logits
from tandem.experts.execution.reference_executor import ReferenceExecutor
from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import AnyCheckpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import pack_dense_layers, packed_layers
from tandem.hf.load import load_checkpoint
from tandem.hf.packed_layers import PackedLinear
from tandem.hf.runtime import require_runtime

CHECKED_LAYERS = 4
CHECKED_TOKENS = 96
# Measured on four layers of the demo model in int4 and mxfp4, with AVX-512, AVX2 and portable
# kernels: KL up to 0.0013, top-1 at least 0.98.
LARGEST_KL = 0.02
LEAST_TOP1 = 0.9


@dataclass(frozen=True, slots=True)
class Agreement:
    """How closely the kernels agree with the reference."""

    layers: int
    tokens: int
    kl: float
    """Mean Kullback-Leibler divergence of the next token's distribution, in nats."""
    top1: float
    """Share of positions with the same most likely token."""

    @property
    def is_good(self) -> bool:
        """Whether the difference is small enough to come from rounded activations alone."""
        return self.kl <= LARGEST_KL and self.top1 >= LEAST_TOP1


def check_model(checkpoint: AnyCheckpoint, offload: OffloadConfig) -> Agreement:
    """Load a checkpoint's first layers and compare the kernels with the reference.

    Raises `TandemError` if the checkpoint cannot be loaded, or if logits are not finite.
    """
    model = load_checkpoint(checkpoint, offload, num_layers=CHECKED_LAYERS)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, CHECKED_TOKENS), generator=random, device="cpu")
    runtime = require_runtime(model)
    if not len(runtime.store):
        # Layers without codes from the checkpoint.
        pack_dense_layers(model, "int8", runtime.threads)
    found = _log_probabilities(model, ids)
    with runtime.using(ReferenceExecutor(runtime.store)), _unpacked(model):
        expected = _log_probabilities(model, ids)
    runtime.executor.close()
    kl = F.kl_div(found, expected, reduction="batchmean", log_target=True)
    same = found.argmax(-1) == expected.argmax(-1)
    layers = int(model.config.get_text_config().num_hidden_layers)
    return Agreement(layers, CHECKED_TOKENS, max(0.0, kl.item()), same.float().mean().item())


def _log_probabilities(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids).logits[0].float()
    require_finite_logits(model, logits, lambda place: ids[0, : place + 1].tolist())
    return logits.log_softmax(-1)


@contextmanager
def _unpacked(model: PreTrainedModel) -> Iterator[None]:
    """In the `with` body, let torch compute packed linear layers with their unpacked weights."""
    layers = [layer for _, layer in packed_layers(model) if not layer.groups]
    handles = [layer.register_forward_hook(_in_torch) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_torch(layer: PackedLinear, inputs: tuple[Tensor], found: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    return F.linear(inputs[0].float(), layer.values(), bias).to(found.dtype)
