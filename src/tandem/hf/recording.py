"""Records what a loaded model's routers choose while it runs prompts."""

from collections.abc import Callable, Sequence
from typing import Any

from tandem.offload.recorder import RoutingRecorder
from tandem.trace import RoutingTrace


def record(
    model: Any, name: str, prompts: Sequence[str], generate: Callable[[str], object]
) -> RoutingTrace:
    """Call `generate` for each prompt, and return the routing of all, a sequence per prompt."""
    quantizer = model.hf_quantizer
    recorder = RoutingRecorder(quantizer.executor)
    quantizer.use(recorder)
    try:
        for prompt in prompts:
            recorder.begin_sequences()
            generate(prompt)
    finally:
        quantizer.use(recorder.inner)
    return recorder.trace(name)
