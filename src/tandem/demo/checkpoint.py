"""Writes a Mixtral checkpoint shard by shard, with at most one shard's tensors in memory."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tandem.checkpoint.config_values import value_of
from tandem.demo.recipe import Recipe
from tandem.foreign_types import GenerationConfig, PreTrainedConfig

INDEX = "model.safetensors.index.json"
ROUTER = "block_sparse_moe.gate.weight"


class ShardWriter:
    """Collects tensors and writes each full shard; `finish` gives the shards their final names."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        """Start without tensors; shards of about `shard_bytes` go into the existing directory."""
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor; it is stored as bfloat16."""
        # A copy: tensors of one shard must not share memory, as equal experts would.
        self._pending[name] = tensor.detach().to(torch.bfloat16, copy=True).contiguous()
        self._pending_bytes += self._pending[name].nbytes
        if self._pending_bytes >= self._shard_bytes:
            self._flush()

    def finish(self) -> None:
        """Write the remaining tensors, give the shards their final names, and write the index."""
        self._flush()
        count = len(self._shards)
        weight_map = {}
        for idx, names in enumerate(self._shards):
            file = f"model-{idx + 1:05}-of-{count:05}.safetensors"
            self._unnamed(idx).rename(self._directory / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        path = self._directory / INDEX
        path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def _unnamed(self, idx: int) -> Path:
        return self._directory / f"shard-{idx:05}"

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self._unnamed(len(self._shards))
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:  # e.g. a full disk, which is an OSError elsewhere
            raise OSError(str(error)) from error
        # safetensors creates files that only their owner can read; share them as the cache's
        # directory is shared.
        path.chmod(self._directory.stat().st_mode & 0o666)
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending = {}
        self._pending_bytes = 0


def read_routers(directory: Path) -> list[torch.Tensor]:
    """Return the router weights of a checkpoint that `ShardWriter` wrote, by layer."""
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    routers: list[torch.Tensor] = []
    while (name := f"model.layers.{len(routers)}.{ROUTER}") in index["weight_map"]:
        with safe_open(directory / index["weight_map"][name], framework="pt") as shard:
            routers.append(shard.get_tensor(name))
    return routers


def mixtral_config(dense: PreTrainedConfig, recipe: Recipe) -> PreTrainedConfig:
    """Return the Mixtral config for a dense Llama config whose FFNs become experts."""
    from transformers import MixtralConfig

    same = [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        *("hidden_act", "rms_norm_eps", "rope_parameters", "initializer_range"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
    ]
    return MixtralConfig(
        **{name: value_of(dense, name) for name in same},
        num_local_experts=recipe.num_experts,
        num_experts_per_tok=recipe.num_experts_per_tok,
        sliding_window=None,
        architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
    )


def generation_config(dense: PreTrainedConfig) -> GenerationConfig:
    """Return the generation config for a dense Llama config: its special tokens."""
    from transformers import GenerationConfig

    return GenerationConfig(
        bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
    )
