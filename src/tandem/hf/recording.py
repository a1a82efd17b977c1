"""Records what a loaded model's routers choose while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tandem.offload.recorder import RoutingRecorder


@contextmanager
def recording(model: Any) -> Iterator[RoutingRecorder]:
    """Record everything that runs inside; each sequence begins with `begin_sequences`."""
    quantizer = model.hf_quantizer
    recorder = RoutingRecorder(quantizer.executor)
    quantizer.use(recorder)
    try:
        yield recorder
    finally:
        quantizer.use(recorder.inner)
