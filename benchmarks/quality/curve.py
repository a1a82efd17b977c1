"""KL over bytes of the judge, by Tandem's formats and recipes and by llama.cpp's types.

    python -m benchmarks.quality.curve --write

All use the same weights, text and engine (Tandem's, in fp32, so that only weights differ), with and
without importance. Bytes are those of all tensors in the file. `--write` stores each result beside
this file; benchmarks.quality.picture draws them.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import tandem
from tandem.cli.keeping import cache_dir
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.importance import kept_importance
from tandem.hf.packed_layers import PackedModule
from tandem.hf.runtime import require_runtime
from tandem.kernels.formats.weight_format import FILE_ALIGNMENT_BYTES, aligned
from tandem.quality.comparison import Tally, measure
from tandem.quality.kept_logits import KeptLogits, LogitsWriter
from tandem.quality.recipe import measure_parts
from tandem.quality.texts import cut_windows, held_out_texts, words_digest

RESULTS = Path(__file__).parent / "judge.json"
UNIFORM = (
    "iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "int4-g128", "mxfp4",
    "iq4_xs", "int4z-g128", "int4", "iq4_nl", "q4_k", "int4z", "int5", "q5_k", "q6_k", "int8",
)  # fmt: skip
BITS = (2.7, 3.0, 3.5, 4.0, 4.25, 4.5, 5.0, 6.0)
_FP32: dict[str, Any] = {"dtype": "float32", "dense_dtype": "none"}


class Case(NamedTuple):
    """One point of the picture."""

    system: str  # "tandem, uniform", "tandem, recipe", "llama.cpp"
    name: str
    has_importance: bool
    num_bytes: int | None
    model: str
    options: dict[str, Any]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=cache_dir() / "models" / "judge")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--only", help="cases of this system alone")
    parser.add_argument("--name", help="cases with this name alone")
    parser.add_argument("--write", action="store_true", help="keep the results")
    options = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        scratch = Path(folder)
        reference = _reference(options.model, options.tokens, scratch / "logits")
        for case in _cases(options.model, scratch, options.only, options.name):
            row = _measured(case, reference)
            print(json.dumps(row), flush=True)
            if options.write:
                _keep(row)


def _keep(row: dict[str, object]) -> None:
    """Store a result, replacing an earlier one of the same case."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    same = ("system", "name", "importance")
    kept = [one for one in kept if any(one[key] != row[key] for key in same)]
    rows = sorted([*kept, row], key=lambda one: (one["system"], one["bytes"], one["importance"]))
    RESULTS.write_text("\n".join(["[", ",\n".join(map(json.dumps, rows)), "]", ""]), "utf-8")


def _reference(model: Path, tokens: int, file: Path) -> KeptLogits:
    tokenizer = AutoTokenizer.from_pretrained(model)
    windows = cut_windows(held_out_texts(), tokenizer, tokens)
    loaded = tandem.load(model, expert_dtype="fp32", **_FP32)
    with LogitsWriter(file, windows, words_digest(windows, tokenizer)) as writer:
        measure(loaded, windows, writer=writer)
    return KeptLogits(file)


def _cases(model: Path, scratch: Path, only: str | None, name: str | None) -> Iterator[Case]:
    importance = kept_importance(open_model(model, may_run_code=False), cache_dir())
    makers: dict[str, Callable[[], Iterator[Case]]] = {
        "tandem, uniform": lambda: _uniform(model, importance),
        "tandem, recipe": lambda: _recipes(model, importance),
        "llama.cpp": lambda: _llama_cpp(model, importance, scratch, name),
    }
    for system, make in makers.items():
        if only in (None, system):
            yield from (case for case in make() if name in (None, case.name))


def _uniform(model: Path, importance: Path) -> Iterator[Case]:
    for kind in UNIFORM:
        formats = {
            "expert_dtype": kind,
            "dense_dtype": kind,
            "dense_formats": {"model.embed_tokens": kind},
        }
        for importance_path in (None, str(importance)):
            own = formats | {"importance": importance_path}
            yield Case("tandem, uniform", kind, importance_path is not None, None, str(model), own)


def _recipes(model: Path, importance: Path) -> Iterator[Case]:
    checkpoint = open_model(model, may_run_code=False)
    measured = measure_parts(checkpoint, OffloadConfig(importance=str(importance)))
    for bits in BITS:
        recipe = measured.recipe(int(bits * measured.num_weights / 8))
        own = recipe.options() | {"importance": str(importance)}
        yield Case("tandem, recipe", f"{bits} bits", True, recipe.num_bytes, str(model), own)


def _llama_cpp(model: Path, importance: Path, scratch: Path, name: str | None) -> Iterator[Case]:
    from benchmarks.quality.llama_cpp import (
        NEEDS_IMPORTANCE,
        TYPES,
        imatrix_of,
        quantise,
        write_judge,
    )

    source = scratch / "judge-f32.gguf"
    write_judge(model, source)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    imatrix = imatrix_of(importance, config["num_hidden_layers"])
    for kind in TYPES:
        for importance_path in (None, imatrix):
            if (importance_path is None and kind in NEEDS_IMPORTANCE) or name not in (None, kind):
                continue
            target = scratch / f"{kind}.gguf"
            if not quantise(source, target, kind, importance_path):
                print(f"llama.cpp refuses {kind}")
                continue
            size = sum(int(t.n_bytes) for t in gguf.GGUFReader(target).tensors)
            own = {"dense_dtype": "auto"}
            yield Case("llama.cpp", kind, importance_path is not None, size, str(target), own)
            target.unlink()


def _measured(case: Case, reference: KeptLogits) -> dict[str, object]:
    loaded: Any = tandem.load(case.model, **(_FP32 | case.options))
    with contextlib.closing(loaded):
        size = packed_bytes(loaded) if case.num_bytes is None else case.num_bytes
        return _row(case, size, measure(loaded, reference.windows, reference=reference))


def packed_bytes(model: Any) -> int:
    """Return the bytes of a packed model's tensors; unpacked ones count 16 bits per value."""
    num_bytes = 0
    for layer in require_runtime(model).store:
        stride = aligned(layer.image_bytes, FILE_ALIGNMENT_BYTES)
        num_bytes += layer.arrivals.num_experts * stride
    packed = [m for m in model.modules() if isinstance(m, PackedModule)]
    num_bytes += sum(layer.packed.num_bytes for layer in packed)
    plain: int = sum(parameter.numel() for parameter in model.parameters())
    return num_bytes + 2 * plain


def _row(case: Case, num_bytes: int, tally: Tally) -> dict[str, object]:
    total = tally.total()
    return {
        "system": case.system,
        "name": case.name,
        "importance": case.has_importance,
        "bytes": num_bytes,
        "kl": total.kl_mean,
        "kl_p99": total.kl_p99,
        "same_first_choice": total.same_first_choice,
        "perplexity": total.perplexity,
        "domains": {domain: found.kl_mean for domain, found in tally.by_domain().items()},
    }


if __name__ == "__main__":
    main()
