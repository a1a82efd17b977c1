"""The state of loading one model: the options, and where incoming tensors go.

Transformers creates the quantizer from the user's options alone. A job with more information is
therefore kept as the current job while `from_pretrained` runs.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.checkpoint.importance import Importance
from tandem.checkpoint.sources.safetensors_header import TensorEntry
from tandem.checkpoint.sources.source import Source, SourceTensor
from tandem.core.errors import TandemError
from tandem.experts.store.host_store import HostLayer
from tandem.hf.config import OffloadConfig
from tandem.hf.dense_codes import DenseCodes
from tandem.hf.importance import given_importance
from tandem.hf.packed_writer import LayerSink

Loaded = Tensor | SourceTensor


class StoreWriter:
    """Finds the host layer of a parameter name and keeps the first error of loading."""

    def __init__(self, sink: LayerSink | None) -> None:
        """Start without layers; `note_stored` will pass complete layers to `sink`, if given."""
        self.layers: dict[str, HostLayer] = {}
        """The layers, by the name of their experts module."""
        self.exact: set[str] = set()
        """Names of the parameters to load as a source's codes, without rounding."""
        self.dense = DenseCodes()
        self.bytes_to_forget = 0
        """How many bytes of the source's files to drop from the page cache, because memory cannot
        hold them beside the model."""
        self.error: TandemError | None = None
        self._sink = sink

    def __deepcopy__(self, memo: dict[int, object]) -> "StoreWriter":
        # Transformers copies each converter per key. A copy of the store would be filled and then
        # lost.
        return self

    def find(self, parameter: str) -> tuple[HostLayer, str] | None:
        """Return (layer, tensor name) of a parameter such as `layers.3.mlp.experts.down_proj`.

        Returns None for a parameter that does not belong to an expert.
        """
        module, _, tensor_name = parameter.rpartition(".")
        layer = self.layers.get(module)
        return (layer, tensor_name) if layer and tensor_name in layer.arrivals.shapes else None

    def needs_nothing(self, layer: HostLayer) -> bool:
        """Whether a layer's tensors can stay unread.

        Without a sink, they cannot. With a sink, they can if an earlier run has packed the layer or
        this run has failed.
        """
        if self._sink is None:
            return False
        return self.error is not None or layer.arrivals.is_complete

    def note_stored(self, layer: HostLayer) -> None:
        """If a layer is complete and there is a sink, pass the layer to the sink."""
        if self._sink is not None and layer.arrivals.is_complete:
            self._sink.take(layer)

    def forgets(self, read: Iterable[Loaded]) -> bool:
        """Tell whether to drop these tensors' pages after reading; if so, lower `bytes_to_forget`.

        Pages of other tensors stay cached, so that the next start need not read them from the disk.
        """
        must_forget = self.bytes_to_forget > 0
        if must_forget:
            weights = (tensor.weight for tensor in read if isinstance(tensor, SourceTensor))
            self.bytes_to_forget -= sum(weight.num_bytes for weight in weights)
        return must_forget

    def keep_error(self, error: TandemError) -> None:
        """Keep the first error, which is raised once all tensors have been read."""
        self.error = self.error or error


@dataclass(kw_only=True, eq=False, slots=True)
class LoadJob:
    """The options of loading one model, what to read, and where the tensors go."""

    options: OffloadConfig
    source: Source | None = None
    """The quantised checkpoint to read; None: Transformers reads the weights."""
    sink: LayerSink | None = None
    """Receives the experts for `tandem.pack`; None: they stay in the host store."""
    entries: Mapping[str, TensorEntry] | None = None
    """The tensors of the checkpoint's safetensors files; None: Transformers finds them."""
    device: torch.device | None = None
    """The final device of the dense parts; None: as options and device map say."""
    is_read_afterwards: bool = False
    """Whether the caller will read a packed checkpoint's pages; otherwise the quantizer does."""
    writer: StoreWriter = field(init=False)
    importance: Importance | None = field(init=False)
    """The importance of inputs for rounding weights; None: all inputs count the same."""

    def __post_init__(self) -> None:
        self.writer = StoreWriter(self.sink)
        self.importance = given_importance(self.options)

    @classmethod
    def present(cls, options: OffloadConfig) -> "LoadJob":
        """Return the job under way; else, for a user's own `from_pretrained`, a new job."""
        return _PRESENT.get() or cls(options=options)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Make this the job of the quantizer that `from_pretrained` creates inside the context."""
        token = _PRESENT.set(self)
        try:
            yield
        finally:
            _PRESENT.reset(token)


_PRESENT: ContextVar[LoadJob | None] = ContextVar("tandem_load_job", default=None)
