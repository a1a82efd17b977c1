"""The keys and values of one layer on a GPU, for all slots: (slots, KV heads, capacity, dim).

int8 keys and values have an fp32 scale for each line of `dim` values, as on the CPU. The tensor
`where` on the device holds the addresses of keys, values and scales. Kernels of captured steps read
these addresses, so that a layer may grow.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.devices.cuda.host_twin import HostTwin
from tandem.kernels.attention import AttentionForm, DistanceBias
from tandem.kernels.device_states import Run
from tandem.kv_cache.cuda.attention import visible
from tandem.kv_cache.index_keys import Zeros

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
KINDS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "int8",
}  # fmt: skip
_LARGEST = 127.0
# Of invented tokens: keys and values that are spread like a model's.
_INVENTED_SPREAD = 0.1


class DecodeKernels(Protocol):
    """Kernels that store the keys and values of a decode step's tokens, and attend.

    Queries, keys and values are (heads, n_tokens, dim), results (n_tokens, heads, dim); `where` and
    `kind` are attributes of the layer's `LayerMemory`. A slot may have several tokens, each of
    which sees the tokens before it. See `triton_kernels.decode_attention`.
    """

    def __call__(
        self,
        form: AttentionForm,
        where: Tensor,
        slots: Tensor,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        kind: str,
        prompt_lengths: Tensor | None = None,
        bias: DistanceBias | None = None,
        is_prompt: bool = False,
    ) -> Tensor:
        """Store the tokens' keys and values; attend to the positions that `form` lets tokens see.

        These are all positions or a window, and the whole prompt if `form.keeps_prompt`. If `value`
        has zero dimensions, values are a part of the keys. `prompt_lengths` has the prompt length
        of each token's slot. With `is_prompt`, all tokens must be of one slot.
        """

    def in_windows(
        self,
        form: AttentionForm,
        where: Tensor,
        slots: Tensor,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        compressed: Tensor | None,
        chosen: Tensor | None,
        sinks: Tensor | None,
        kind: str,
        ring: int,
        ratio: int,
    ) -> Tensor:
        """Store the tokens' keys; attend to windows in rings and to compressed keys.

        See `DeviceWindows.of_step`. `compressed` are the new compressed keys, one for each token;
        `chosen` has the numbers of the compressed keys that tokens see; None: all.
        """

    def select_keys(
        self,
        keys: Tensor,
        slots: Tensor,
        positions: Tensor,
        key: Tensor,
        query: Tensor,
        weights: Tensor,
        *,
        block: int,
        scale: float,
        most: int,
        length: int,
    ) -> Tensor:
        """Store tokens' index keys; return the numbers (n_tokens, most) of the selected keys.

        See `DeviceIndexKeys.of_step`. `keys` is (slots, room, dim) fp32, one key per `block` of
        positions; the keys of the first `length` positions are scored. `key` is (n_tokens, dim),
        `query` (n_tokens, heads, dim), `weights` (n_tokens, heads).
        """

    def select_keys_of_prompt(
        self,
        keys: Tensor,
        positions: Tensor,
        query: Tensor,
        weights: Tensor,
        *,
        block: int,
        scale: float,
        most: int,
        first: int,
    ) -> Tensor:
        """Return a mask (n_tokens, keys) of a slot's `keys` (keys, dim) that a prompt's tokens see.

        The tokens must be at consecutive `positions` (n_tokens,), from `first` on, and their keys
        must have been stored. The other arguments are as in `select_keys`.
        """


def stored_dtype(kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which keys and values are stored; "auto" is `dtype`, the model's.

    Raises `ConfigError` for an unknown `kv_dtype`.
    """
    if kv_dtype not in ("auto", *_DTYPES):
        raise ConfigError(f"kv_dtype is {kv_dtype!r}; expected auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(kv_dtype, dtype)


class StepPlaces:
    """The slots, positions and runs of the tokens of steps of one size, at fixed addresses."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        """Allocate memory for steps of `num_tokens` tokens; `upload` sets a step's values."""
        self._device, self._masks = device, dict[tuple[int, int, bool], Tensor]()
        self._width = max(2, num_tokens)  # kernels are compiled for addresses of whole 16 bytes
        fields = len(Run._fields)
        with torch.inference_mode(False):
            self._memory = torch.zeros(
                self._width * 3 + num_tokens * fields, dtype=torch.int64, device=device
            )
        self._twin = HostTwin(self._memory)
        self.slots = self._memory[:num_tokens]
        self.positions = self._memory[self._width : self._width + num_tokens]
        self.prompt_lengths = self._memory[2 * self._width : 2 * self._width + num_tokens]
        """The prompt length of each token's slot; see `SlotCache.prompt_lengths`."""
        self.runs = self._memory[3 * self._width :].view(num_tokens, fields)
        """The step's runs in the layout of `device_states.Run`."""

    def upload(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        runs: Sequence[Run],
        prompt_lengths: Sequence[int],
    ) -> None:
        """Queue copies of a step's values to the device; update the masks that `mask` returned."""
        gap = [0] * (self._width - len(slots))
        rows = (*slots, *gap, *positions, *gap, *prompt_lengths, *gap)
        numbers = [*rows, *(number for run in runs for number in run)]
        self._twin.upload(numbers)
        for kind, mask in self._masks.items():
            mask.copy_(self._seen(*kind, mask.shape[3]))

    def mask(self, form: AttentionForm, capacity: int) -> Tensor:
        """Return a mask of which of `capacity` positions tokens see: (n_tokens, 1, 1, capacity).

        Calls with the same `capacity` return the same tensor for a form; `upload` updates it.
        """
        kind = form.window, form.chunk, form.keeps_prompt
        if kind not in self._masks or self._masks[kind].shape[3] != capacity:
            with torch.inference_mode(False):
                self._masks[kind] = self._seen(*kind, capacity)
        return self._masks[kind]

    def _seen(self, window: int, chunk: int, keeps_prompt: bool, capacity: int) -> Tensor:
        place = self.positions[:, None, None, None]
        position = torch.arange(capacity, device=self._device)
        seen = visible(place, position, window, chunk)
        if not keeps_prompt:
            return seen
        return seen | (position < self.prompt_lengths[:, None, None, None])


class LayerMemory:
    """One layer's keys and values of all slots.

    It must be created and grown outside inference mode, so that its tensors are ordinary ones.
    """

    def __init__(
        self,
        form: AttentionForm,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        zeros: Zeros,
        *,
        has_values: bool = True,
    ) -> None:
        """Allocate `capacity` positions for each slot.

        Without `has_values` the values are the first dimensions of the keys.
        """
        self.dtype, self._zeros, self._value_dim = dtype, zeros, form.value_dim
        lead = (num_slots, form.num_kv_heads, capacity)
        dims = (form.key_dim, form.value_dim) if has_values else (form.key_dim,)
        self._num_lines = len(dims)
        self._tensors = [zeros((*lead, dim), dtype) for dim in dims]
        if dtype == torch.int8:
            self._tensors += [zeros(lead, torch.float32) for _ in dims]
        self.where = zeros((5,), torch.int64)
        self._note_where()

    @property
    def kind(self) -> str:
        """The kernels' name for the layer's dtype."""
        return KINDS[self.dtype]

    @property
    def has_values(self) -> bool:
        """Whether values are stored separately, not as a part of the keys."""
        return self._num_lines > 1

    @property
    def capacity(self) -> int:
        """Positions that a slot has room for."""
        return self._tensors[0].shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and scales."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def store(self, slots: Tensor | int, at: Tensor | slice, key: Tensor, value: Tensor) -> None:
        """Write keys and values at positions `at` of some slots, shaped like `[slots, :, at]`."""
        for number, new in zip(range(self._num_lines), (key, value), strict=False):
            if self.dtype == torch.int8:
                new, scale = _codes(new)
                self._tensors[number + self._num_lines][slots, :, at] = scale
            self._tensors[number][slots, :, at] = new.to(self.dtype)

    def as_kept(self, key: Tensor) -> Tensor:
        """Return keys as `read` would return them after `store`: rounded to the stored dtype."""
        if self.dtype == torch.int8:
            codes, scale = _codes(key)
            return (codes * scale[..., None]).to(key.dtype)
        return key.to(self.dtype).to(key.dtype)

    def keys_at(self, slots: int | Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the keys at positions `at` of some slots, shaped like `[slots, :, at]`."""
        keys = self._tensors[0][slots, :, at]
        if self.dtype == torch.int8:
            keys = keys * self._tensors[self._num_lines][slots, :, at][..., None]
        return keys.to(dtype)

    def read(
        self, slots: int | slice | Tensor, end: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return in `dtype` the keys and values of the first `end` positions of some slots."""
        found = []
        for number in range(self._num_lines):
            stored = self._tensors[number][slots, :, :end]
            if self.dtype == torch.int8:
                stored = stored * self._tensors[number + self._num_lines][slots, :, :end, None]
            found.append(stored.to(dtype))
        return found[0], found[1] if len(found) > 1 else found[0][..., : self._value_dim]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for tensor in self._tensors:
            tensor[target, :, :length] = tensor[source, :, :length]

    def invent(self, length: int) -> None:
        """Fill the first `length` positions of all slots with made-up numbers."""
        for tensor in self._tensors:
            some = tensor[:, :, :length]
            if self.dtype != torch.int8:
                some.normal_(std=_INVENTED_SPREAD)
            elif tensor.dtype == torch.int8:
                some.random_(-int(_LARGEST), int(_LARGEST) + 1)
            else:
                some.fill_(3 * _INVENTED_SPREAD / _LARGEST)

    def grow(self, capacity: int, used: int) -> None:
        """Allocate memory for `capacity` positions, and copy the first `used` positions to it.

        Kernels that are queued later read the new memory.
        """
        for number, old in enumerate(self._tensors):
            new = self._zeros((*old.shape[:2], capacity, *old.shape[3:]), old.dtype)
            new[:, :, :used] = old[:, :, :used]
            self._tensors[number] = new
        self._note_where()

    def _note_where(self) -> None:
        lines = self._tensors[: self._num_lines]
        scales = self._tensors[self._num_lines :] or lines
        found = [x.data_ptr() for x in (lines[0], lines[-1], scales[0], scales[-1])]
        host = torch.tensor([*found, lines[0].shape[2]], device="cpu")
        self.where.copy_(host)


def _codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return `numbers` (..., dim) as int8 codes, and an fp32 scale (...) for each `dim` values."""
    scale = numbers.float().abs().amax(-1) / _LARGEST
    codes = (numbers.float() / scale.clamp_min(1e-32)[..., None] + 0.5).floor()
    return codes.to(torch.int8), scale
