"""What goes to a GPU in small pieces: pinned memory on the host, so that no copy of it waits."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostTwin:
    """A tensor of a step on the host, pinned if its own is on a GPU, from which that is brought."""

    def __init__(self, target: Tensor) -> None:
        """Bring `target`, which stays where it is."""
        self._target, self._is_cuda = target, target.device.type == "cuda"
        with torch.inference_mode(False):
            host = torch.zeros(target.shape, dtype=target.dtype, device="cpu")
            self.host = host.pin_memory() if self._is_cuda else host
        self._brought: torch.cuda.Event | None = None

    def bring(self, values: Sequence[object] | Tensor) -> None:
        """Queue the copy of values, as many as there is room for."""
        if self._brought is not None:  # a step has waited for the one before: only after an error
            self._brought.synchronize()
        if isinstance(values, Tensor):
            self.host.copy_(values)
        else:
            self.host.view(-1).numpy()[:] = values
        self._target.copy_(self.host, non_blocking=True)
        if self._is_cuda:
            self._brought = torch.cuda.Event()
            self._brought.record(torch.cuda.current_stream(self._target.device))


def on_its_way(numbers: Sequence[object], device: torch.device) -> Tensor:
    """Return numbers on the host, pinned if they go to a GPU: copies of them do not wait then."""
    host = torch.tensor(numbers, device="cpu")
    return host.pin_memory() if device.type == "cuda" else host
