"""Stages for every machine: the kernels of each instruction set, and a model's answer."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import tandem
from tandem.core.errors import ExecutionError
from tandem.forecast.report.stages import Stage, StageResult
from tandem.forecast.self_check import check_model
from tandem.generate.generator import Generator
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.runtime import require_runtime
from tandem.kernels import _native

_FORMATS = ("bf16", "int8", "int4", "mxfp4")
_PROMPT = tuple(range(40, 72))
STEPS = 32
# Largest difference of a token's logits, relative to their size. Recorded steps add in another
# order than torch, and the last digit of a sum may round to another integer in int8 kernels. A
# mistake gives about one.
_MOST_DIFFERENCE = 3e-2
VOCABULARY = 256
# Larger than in Transformers, so that the most likely token leads clearly.
_WEIGHT_SPREAD = 0.1


def save_tiny_model(directory: Path) -> Path:
    """Write a checkpoint of two layers with eight experts each, in fp32; always the same."""
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=512, initializer_range=_WEIGHT_SPREAD,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MixtralForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return directory


def kernels() -> StageResult:
    """Compare the kernels of each instruction set and format with the reference.

    Raises `ExecutionError` if they disagree.
    """
    found, numbers = [], {}
    with TemporaryDirectory() as folder:
        checkpoint = open_model(save_tiny_model(Path(folder) / "tiny"), may_run_code=False)
        for isa in _native.available_isas():
            for name in _FORMATS:
                agreement = check_model(checkpoint, OffloadConfig(expert_dtype=name, isa=isa))
                numbers[f"{isa} {name}"] = agreement.kl
                if not agreement.is_good:
                    raise ExecutionError(
                        f"{isa} kernels of {name}: KL {agreement.kl:.2g} nats, top-1 "
                        f"{agreement.top1:.0%} against the reference"
                    )
            worst = max(numbers[f"{isa} {name}"] for name in _FORMATS)
            found.append(f"{isa} KL at most {worst:.1e}")
    return StageResult(f"{', '.join(_FORMATS)}: {'; '.join(found)} nats", numbers)


def answer() -> StageResult:
    """Compare a tiny model's logits in recorded and in unrecorded decode steps.

    Raises `ExecutionError` if they differ by more than `_MOST_DIFFERENCE`, relative to their size.
    """
    with TemporaryDirectory() as folder:
        checkpoint = save_tiny_model(Path(folder) / "tiny")
        model = tandem.load(checkpoint, dtype="float32", expert_dtype="int8")
        recorded, plain = (
            logits_of(Generator(model, has_replay=has_replay)) for has_replay in (True, False)
        )
        require_runtime(model).executor.close()
    difference = ((recorded - plain).norm(dim=-1) / plain.norm(dim=-1)).max().item()
    if not difference <= _MOST_DIFFERENCE:  # also if it is NaN
        raise ExecutionError(
            f"the logits of recorded steps are up to {difference:.2%} from those of plain ones"
        )
    return StageResult(f"{STEPS} tokens, recorded steps within {difference:.2%} of plain ones")


def logits_of(generator: Generator) -> torch.Tensor:
    """Return the logits (1 + STEPS, vocabulary) of a fixed prompt and STEPS fixed tokens."""
    pool = generator.slot_pool(1, capacity=len(_PROMPT) + STEPS)
    logits = [pool.prefill({0: list(_PROMPT)}).float().cpu().view(1, -1)]
    tokens = ((17 * step) % VOCABULARY for step in range(STEPS))
    logits += [pool.decode({0: token}).float().cpu().clone() for token in tokens]
    return torch.cat(logits)


CPU_STAGES = (Stage("kernels", kernels), Stage("answer", answer))
