"""Tandem with a shape in formats of its own."""

from benchmarks.generation.systems.setting import ShapeSetting

from tandem.bench.model_shapes import ModelShape, find_shape
from tandem.bench.peers.tandem_model import Tandem
from tandem.bench.random_model import build_random_model
from tandem.hf.config import OffloadConfig


class PackedTandem(Tandem):
    """The shape in Tandem's formats, with random weights."""

    def __init__(self, setting: ShapeSetting, shape: ModelShape | None = None) -> None:
        """Build the model directly in packed form, for a shape or for the setting's shape."""
        offload = OffloadConfig(
            expert_dtype=setting.expert_dtype, threads=setting.threads, isa=setting.isa or None
        )
        model = build_random_model(
            shape or find_shape(setting.shape), offload, dense_dtype=setting.dense_dtype,
            num_layers=setting.layers, vocabulary=setting.vocabulary,
        )  # fmt: skip
        self._prepare(setting, model)
