"""Embeddings that stay in host memory: a token's row is read there and copied to the GPU.

A captured step cannot copy token ids to the host. A caller that knows the ids on the host reads the
rows first and passes them: `with given_rows(rows): model(ids)`. Otherwise the host waits for the
ids.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from tandem.devices.cuda.host_twin import HostTwin
from tandem.foreign_types import ModelPart

_GIVEN: ContextVar[Tensor | None] = ContextVar("tandem_given_rows", default=None)


class HostEmbedding(nn.Module):
    """Takes the place of a model's embeddings, which stay in host memory; has no parameters."""

    def __init__(self, on_host: ModelPart, device: torch.device) -> None:
        """Take the model's embeddings on the CPU, and the device to which their rows are copied."""
        super().__init__()
        self._on_host = (on_host,)  # not a submodule, so moving the model does not move it
        self.device = device
        self.num_embeddings: int = on_host.num_embeddings
        self.embedding_dim: int = on_host.embedding_dim
        self.padding_idx = on_host.padding_idx
        self.dtype: torch.dtype = on_host.weight.dtype

    @property
    def on_host(self) -> ModelPart:
        """The model's own embeddings, on the CPU."""
        return self._on_host[0]

    def rows(self, ids: Sequence[int]) -> Tensor:
        """Return the tokens' embeddings on the host, (n, embedding_dim)."""
        found: Tensor = self.on_host(torch.tensor(ids, dtype=torch.int64, device="cpu"))
        return found

    def forward(self, ids: Tensor) -> Tensor:
        """Return the tokens' embeddings on the device: (...) int64 -> (..., embedding_dim).

        If `given_rows` gives rows in the shape of `ids`, the result is these rows.
        """
        given = _GIVEN.get()
        if given is not None and given.shape[:-1] == ids.shape:
            return given
        rows: Tensor = self.on_host(ids.cpu())
        return rows.to(self.device)

    @property
    def weight(self) -> Tensor:
        """The weight, in host memory, for code that inspects it."""
        weight: Tensor = self.on_host.weight
        return weight

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        """Save the weight under the name of the layer that was replaced."""
        for name, value in self.on_host.state_dict(keep_vars=keep_vars).items():
            destination[prefix + name] = value


@contextmanager
def given_rows(rows: Tensor | None) -> Iterator[None]:
    """Use `rows` as the embeddings of the ids in the `with` body's model call.

    None: the model call reads the ids' embeddings itself.
    """
    token = _GIVEN.set(rows)
    try:
        yield
    finally:
        _GIVEN.reset(token)


class StepRows:
    """The embeddings of a step's tokens, at a fixed address on the device."""

    def __init__(self, embeddings: nn.Module, num_slots: int) -> None:
        """Allocate memory for steps of `num_slots` tokens, unless the device has all embeddings."""
        self._source = embeddings if isinstance(embeddings, HostEmbedding) else None
        self.memory: Tensor | None = None
        """The embeddings of a step's tokens, (num_slots, 1, embedding_dim).

        None if the device has all embeddings.
        """
        if self._source is not None:
            shape = num_slots, 1, self._source.embedding_dim
            with torch.inference_mode(False):
                self.memory = torch.zeros(
                    shape, dtype=self._source.dtype, device=self._source.device
                )
            self._twin = HostTwin(self.memory)

    def upload(self, ids: Sequence[int]) -> None:
        """Queue the copy of a step's embeddings to `memory`; a no-op if `memory` is None."""
        if self._source is not None and self.memory is not None:
            self._twin.upload(self._source.rows(ids)[:, None])

    def of_prompt(self, ids: Sequence[int]) -> Tensor | None:
        """Return a prompt's embeddings, copied to the device: (1, n, embedding_dim).

        Returns None if the model's embeddings are on the device.
        """
        if self._source is None:
            return None
        rows = self._source.rows(ids)[None]
        rows = rows.pin_memory() if self._source.device.type == "cuda" else rows
        return rows.to(self._source.device, non_blocking=True)
