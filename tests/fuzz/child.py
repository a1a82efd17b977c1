"""Tries damaged files by libFuzzer, one after another; records all but one-sentence errors.

python -m tests.fuzz.child KIND OUT [libFuzzer's options]: with KIND "all", an input's first byte
selects the kind. Where atheris has no wheel, files are mutated at random with the same options.
"""

import contextlib
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from tests.fuzz.memory import limit_memory

try:
    import atheris
except ImportError:  # it has no wheel for this machine
    atheris = None


class _PlainSources:
    """Finds modules with Python's own loader, the only kind that atheris can instrument.

    An editable install wraps this loader.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "tandem":
            return None
        later_finders = sys.meta_path[sys.meta_path.index(cls) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in later_finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = SourceFileLoader(name, spec.origin)
        return spec


if atheris is not None:
    sys.meta_path.insert(0, _PlainSources)
with atheris.instrument_imports(["tandem"]) if atheris else contextlib.nullcontext():
    from tests.fuzz.kinds import kinds

_PROCESSOR_SECONDS = 20  # of one input; then a signal ends the process
_MUTATED_BLINDLY = 0.1


def main(kind: str, out: Path, options: list[str]) -> None:
    """Try inputs until libFuzzer ends the process."""
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-", dir=out))
    found = kinds(scratch)
    names = list(found) if kind == "all" else [kind]
    answers: Counter[str] = Counter()
    report = out / f"{kind}.answers"
    corpus = scratch / "corpus"
    corpus.mkdir()
    for number, name in enumerate(names):
        (corpus / name).write_bytes(bytes([number]) + found[name].seed)

    def mutate(data: bytes, most_bytes: int, seed: int) -> bytes:
        chance = random.Random(seed)
        chosen = found[names[data[0] % len(names)]] if data else found[names[0]]
        if atheris and chance.random() < _MUTATED_BLINDLY:
            changed: bytes = atheris.Mutate(data, most_bytes)
            return changed
        # As often from the whole file as from earlier damage.
        before = chosen.seed if len(data) < 2 or chance.random() < 0.5 else data[1:]
        return (data[:1] + chosen.mutate(before, chance))[:most_bytes]

    def one(data: bytes) -> None:
        if not data:
            return
        name = names[data[0] % len(names)]
        (out / "last").write_bytes(data)
        # By processor time, because other processes may delay this one.
        signal.setitimer(signal.ITIMER_PROF, _PROCESSOR_SECONDS)
        limit_memory()
        try:
            answers[f"{name} {found[name].answer(data[1:])}"] += 1
        except BaseException as error:  # a finding, also for panics, which are no `Exception`
            answers[f"{name} found {type(error).__name__}"] += 1
            _note(out, name, data[1:], error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        part = report.with_suffix(".part")
        part.write_text("\n".join(f"{n} {what}" for what, n in sorted(answers.items())))
        part.replace(report)  # the process may end at any time

    if atheris is None:
        _fuzz_blindly(one, mutate, dict(option.split("=") for option in options), len(names))
        return
    longest = 2 * max(len(one_kind.seed) for one_kind in found.values())
    atheris.Setup(
        [sys.argv[0], f"-max_len={longest}", "-print_final_stats=0", *options, str(corpus)],
        one, custom_mutator=mutate,
    )  # fmt: skip
    atheris.Fuzz()


def _fuzz_blindly(
    one: Callable[[bytes], None],
    mutate: Callable[[bytes, int, int], bytes],
    options: dict[str, str],
    num_kinds: int,
) -> None:
    """Try files with random mutations."""
    chance = random.Random(int(options["-seed"]))
    end = time.monotonic() + float(options.get("-max_total_time", "inf"))
    for _ in range(int(options["-runs"])):
        if time.monotonic() > end:
            return
        one(mutate(bytes([chance.randrange(num_kinds)]), 1 << 24, chance.getrandbits(32)))


def _note(out: Path, name: str, data: bytes, error: BaseException) -> None:
    """Store the first input for each source line that raises."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = "".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    found = out / f"{name}-{sha256(where.encode()).hexdigest()[:8]}"
    if not found.exists():
        found.write_bytes(data)
        text = "".join(traceback.format_exception(error))
        found.with_suffix(".txt").write_text(text, errors="backslashreplace")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
