"""Tries lm-eval in process: Tandem's scores beside those of Transformers.

The environment also sees Tandem, torch and Transformers of the current one.
"""

# /// script
# # torch comes first: alone it may bring gigabytes of CUDA.
# dependencies = ["torch==2.13.0", "lm_eval[hf]"]
# [tool.tandem]
# in_turns = true
# above_tandem = true
# ///

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import tandem
from tests.clients.lm_eval_scores import evaluate
from tests.clients.trying import Served, report

# The effect of two orders of summation in bf16 on a score of a few hundred tokens.
_TOLERANCE = 0.02


def generation(served: Served) -> str:
    return f"{evaluate('tandem_generation', _loaded(served)):.4g}"


def multiple_choice(served: Served) -> str:
    return _compared(served, "tandem_choice")


def perplexity(served: Served) -> str:
    return _compared(served, "tandem_perplexity")


def model_in_int8(served: Served) -> str:
    model = tandem.load(served.directory, expert_dtype="int8", dense_dtype="int8")
    return f"{evaluate('tandem_perplexity', _as_lm(model, served)):.4g}"


def packed_model_by_name(served: Served) -> str:
    """Let lm-eval itself open a packed checkpoint by name, as its command line does."""
    with tempfile.TemporaryDirectory() as temporary:
        tandem.pack(served.directory, Path(temporary) / "packed", expert_dtype="int8")
        arguments = {
            "pretrained": str(Path(temporary) / "packed"),
            "device": "cpu",
            "softmax_dtype": "float32",
        }
        return f"{evaluate('tandem_perplexity', 'hf', model_args=arguments):.4g}"


def _compared(served: Served, task: str) -> str:
    ours, theirs = evaluate(task, _loaded(served)), evaluate(task, _eager(served))
    assert abs(ours - theirs) <= _TOLERANCE * theirs, (ours, theirs)
    return f"{ours:.4g} (Transformers' own {theirs:.4g})"


@cache
def _loaded(served: Served) -> Any:
    return _as_lm(tandem.load(served.directory), served)


@cache
def _eager(served: Served) -> Any:
    return _as_lm(AutoModelForCausalLM.from_pretrained(served.directory, dtype="auto"), served)


def _as_lm(model: Any, served: Served) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(served.directory)
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, softmax_dtype="float32")


if __name__ == "__main__":
    torch.set_num_threads(1)
    tries = [generation, multiple_choice, perplexity, model_in_int8, packed_model_by_name]
    sys.exit(report("lm_eval", tries))
