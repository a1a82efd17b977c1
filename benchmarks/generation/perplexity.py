"""What quantising costs in perplexity: python -m benchmarks.generation.perplexity

The demo model on 4,096 tokens of WikiText-2 in windows of 512, through Tandem's own attention and
KV cache, for formats of experts, of dense layers and of keys and values.
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import tandem
from tandem.cli.model_choice import ModelChoice, find_model
from tandem.decode.substitutions.shallow_copy import ShallowCopy
from tandem.hf.compat import cache_argument
from tandem.hf.runtime import require_runtime
from tandem.kernels.attention import Segment
from tandem.kv_cache.base import stepping
from tandem.kv_cache.cpu import KvCache
from tandem.kv_cache.stand_ins import transformers_cache

TEXT = Path(__file__).parents[2] / "tests" / "data" / "wikitext_4096.txt"
WINDOW = 512


class Formats(NamedTuple):
    """One row of the table."""

    expert_dtype: str
    dense_dtype: str
    kv_dtype: str


CASES = (
    Formats("auto", "none", "auto"),
    Formats("auto", "none", "int8"),
    Formats("int8", "int8", "auto"),
    Formats("int4", "none", "auto"),
    Formats("int4", "int8-g32", "auto"),
    Formats("int4", "int8-g32", "int8"),
    Formats("int4", "int4", "auto"),
    Formats("int4z", "int8-g32", "auto"),
    Formats("int4z", "int4z", "auto"),
)


@torch.inference_mode()
def perplexity(model: Any, windows: Tensor, kv_dtype: str) -> float:
    """Return the perplexity over (windows, tokens) ids, each window read from its start."""
    threads = require_runtime(model).threads
    copy = ShallowCopy(model)
    argument, total = cache_argument(model), 0.0
    for ids in windows:
        cache = KvCache(threads, 1, len(ids), kv_dtype=kv_dtype)
        shell = transformers_cache(model, cache)
        cache.begin([Segment(0, 0, len(ids))])
        with stepping(cache):
            positions = cache.positions[None]
            logits = copy.model(
                input_ids=ids[None], position_ids=positions, use_cache=True, **{argument: shell}
            ).logits[0]
        cache.commit()
        total += float(F.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum"))
    return math.exp(total / (windows.numel() - len(windows)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", help="cases whose experts have this format")
    options = parser.parse_args()
    disable_progress_bar()
    source = find_model(ModelChoice(model=options.model), quiet=False).model
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    num_windows = min(options.tokens, len(ids)) // WINDOW
    windows = ids[: num_windows * WINDOW].view(-1, WINDOW)
    first = 0.0
    for case in CASES:
        if options.only not in (None, case.expert_dtype):
            continue
        model = tandem.load(source, expert_dtype=case.expert_dtype, dense_dtype=case.dense_dtype)
        found = perplexity(model, windows, case.kv_dtype)
        first = first or found
        print(
            f"experts {case.expert_dtype:5} dense {case.dense_dtype:9} KV {case.kv_dtype:5} "
            f"perplexity {found:.2f} ({found / first - 1:+.1%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
