"""The inputs of a captured step at fixed addresses, except its slots and positions."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tandem.devices.cuda.embedding import StepRows
from tandem.devices.cuda.host_twin import HostTwin


class StepInputs:
    """The input tensors that all steps of one size share."""

    def __init__(
        self,
        embeddings: nn.Module,
        size: int,
        device: torch.device,
        room_for_hidden: Callable[[int], Tensor | None],
    ) -> None:
        """Allocate the inputs; the tokens' embeddings too if `embeddings` is in host memory."""
        self._num_padding = 0
        self.hidden = room_for_hidden(size)
        """The output head's input, (n_tokens, width); None if `room_for_hidden` gives None."""
        with torch.inference_mode(False):
            self.ids = torch.zeros((size, 1), dtype=torch.int64, device=device)
            self.idle = torch.zeros((size, 1), dtype=torch.int64, device=device)
            """0 for tokens, -1 for padding: `ids | idle` marks padding tokens."""
            self.last = torch.full((1,), size - 1, dtype=torch.int64, device=device)
            """The index of the last token before the padding."""
            self._rows = StepRows(embeddings, size)
        self._host_ids, self._host_idle = HostTwin(self.ids), HostTwin(self.idle)
        self._host_last = HostTwin(self.last)

    @property
    def embedded(self) -> Tensor | None:
        """The tokens' embeddings, (n_tokens, 1, width); None: the device has all embeddings."""
        return self._rows.memory

    @property
    def tensors(self) -> list[Tensor]:
        """All input tensors."""
        return [self.ids, self.idle, self.last, *([] if self.embedded is None else [self.embedded])]

    def upload(self, ids: Sequence[int]) -> None:
        """Queue the copy of a step's token ids to the device; padding tokens fill the step."""
        size, num_padding = len(self.ids), len(self.ids) - len(ids)
        whole = [*ids, *[0] * num_padding]
        self._host_ids.upload(whole)
        self._rows.upload(whole)
        if num_padding != self._num_padding:
            self._num_padding = num_padding
            self._host_idle.upload([-(place >= len(ids)) for place in range(size)])
            self._host_last.upload([len(ids) - 1])
