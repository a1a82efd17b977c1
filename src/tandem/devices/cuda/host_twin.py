"""Copies small inputs to a GPU through pinned memory, so that the host does not wait."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostTwin:
    """The host copy of a device tensor, pinned if the tensor is on a GPU."""

    def __init__(self, target: Tensor) -> None:
        """Allocate a host buffer of the size of `target`; `upload` writes to `target` in place."""
        self._target, self._is_cuda = target, target.device.type == "cuda"
        with torch.inference_mode(False):
            host = torch.zeros(target.shape, dtype=target.dtype, device="cpu")
            self.host = host.pin_memory() if self._is_cuda else host
        self._copied: torch.cuda.Event | None = None

    def upload(self, values: Sequence[object] | Tensor) -> None:
        """Queue the copy of `values` to the target; both must have the same number of elements."""
        # Waits only after an error; otherwise a step has waited for this copy.
        if self._copied is not None:
            self._copied.synchronize()
        if isinstance(values, Tensor):
            self.host.copy_(values)
        else:
            self.host.view(-1).numpy()[:] = values
        self._target.copy_(self.host, non_blocking=True)
        if self._is_cuda:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._target.device))


def on_its_way(numbers: Sequence[object], device: torch.device) -> Tensor:
    """Return `numbers` as a host tensor, pinned for a GPU so that its copy there does not wait."""
    host = torch.tensor(numbers, device="cpu")
    return host.pin_memory() if device.type == "cuda" else host
