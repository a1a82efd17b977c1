"""Transformers alone: a shape in bf16 with random weights, all of it computed by torch."""

import statistics
import time
from typing import Any

import torch
from benchmarks.generation.systems.setting import ShapeSetting

from tandem.bench.model_shapes import find_shape
from tandem.bench.peers.setting import Speeds
from tandem.bench.random_model import empty_model_of
from tandem.hf.compat import cache_argument

_PART = 512  # tokens of a prompt that are computed at once


class TorchModel:
    """The model's own code, with Transformers' grouped products for experts."""

    def __init__(self, setting: ShapeSetting) -> None:
        """Build the model, with two bytes per weight."""
        torch.set_num_threads(setting.threads)
        shape = find_shape(setting.shape).sample(setting.layers)
        model = empty_model_of(shape, setting.vocabulary)
        model.to_empty(device="cpu")
        model.init_weights()  # also the tables of rotary embeddings
        self._cache = cache_argument(model)
        self._setting, self._model = setting, model.eval().requires_grad_(False)

    @torch.inference_mode()
    def measure(self, depth: int) -> Speeds:
        """Measure with a new cache."""
        setting, vocabulary = self._setting, self._model.config.vocab_size
        depth = -(-depth // _PART) * _PART
        random = torch.Generator().manual_seed(depth)
        ids = torch.randint(0, vocabulary, (1, depth + setting.prompt), generator=random)
        cache: Any = None
        start = time.perf_counter()
        for first in range(0, ids.shape[1], _PART):  # of the depth, whole parts
            if first == depth:
                start = time.perf_counter()
            out = self._model(
                ids[:, first : first + _PART], use_cache=True, **{self._cache: cache},
                logits_to_keep=1,
            )  # fmt: skip
            cache = out[self._cache]
        prefill = time.perf_counter() - start
        seconds = []
        for _ in range(setting.steps):
            start = time.perf_counter()
            out = self._model(out.logits[:, -1].argmax(-1)[None], **{self._cache: cache})
            seconds.append(time.perf_counter() - start)
        return Speeds(setting.prompt / prefill, 1 / statistics.median(seconds[2:]), 0.0, 0.0)
