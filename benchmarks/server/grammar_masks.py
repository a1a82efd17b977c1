"""The time of grammars' slowest mask, with the server's limits and with llguidance's own.

python -m benchmarks.server.grammar_masks

Grammars, normal ones and slow ones, are followed for some steps over a vocabulary of 150,000
tokens. A grammar ends early at a limit.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence

import llguidance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandem.dialects.grammar import LIMITS, json_grammar, written_grammar
from tandem.engine.constraint import SLOW_MASK_SECONDS

_TOKENS = 150_000
_STEPS = 1000
_SECONDS = 20.0  # of one grammar, at most
_NAMES = [f"property_{number}_name" for number in range(190)]
_OBJECT = {"type": "object", "properties": {name: {"type": "string"} for name in _NAMES}}
_HONEST = {"190 optional properties": _OBJECT, "any JSON": {}}
_SLOW = {
    "ambiguous": 'start: s\ns: s s | s s s | "a" | "b"',
    "ambiguous, with nothing": 'start: s\ns: s s s s | "a"+ | "b" | ""',
    "lexemes": 'start: /(a|b)*a(a|b){12}/ s\ns: /[ab]+c?/ s | /[a-z]*b/ s | "c"',
}


def tables() -> llguidance.LLTokenizer:
    """Return the tables of a vocabulary of bytes and random words."""
    chance = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz0123456789_"
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys([*pieces, "<end>"])
    while len(words) < _TOKENS:
        word = "".join(chance.choices(letters, k=chance.randrange(2, 9)))
        words[chance.choice(("Ġ", '"', "", "")) + word] = None
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=_TOKENS, eos_token=len(pieces))


def masks(
    tokenizer: llguidance.LLTokenizer,
    grammar: str,
    limits: llguidance.LLParserLimits | None,
    answer: str,
) -> tuple[Sequence[float], bool]:
    """Return the seconds of each mask but the first, and whether a limit ended the answer.

    Tokens are those of `answer`, or any single bytes that the grammar allows.
    """
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    chance, seconds = random.Random(2), list[float]()
    ids = tokenizer.tokenize_str(answer)
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end and len(seconds) < (len(ids) or _STEPS):
        begin = time.thread_time()
        mask = matcher.compute_bitmask()
        seconds.append(time.thread_time() - begin)
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = [n for n in range(256) if mask[n // 8] >> n % 8 & 1] or [256]
        matcher.consume_token(ids[len(seconds) - 1] if ids else chance.choice(allowed))
    return seconds[1:] or [0.0], matcher.is_error()


def main() -> int:
    """Print the slowest mask of each grammar, in milliseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server.grammar_masks")
    parser.parse_args()
    tokenizer = tables()
    answer = json.dumps(dict.fromkeys(_NAMES[::3], "x"), separators=(",", ":"))
    grammars = {name: (json_grammar(schema), answer) for name, schema in _HONEST.items()}
    grammars |= {name: (written_grammar(text), "") for name, text in _SLOW.items()}
    found: dict[str, dict[str, float | bool]] = {}
    for (name, (grammar, text)), (which, limits) in itertools.product(
        grammars.items(), (("tandem", LIMITS), ("llguidance", None))
    ):
        seconds, is_over = masks(tokenizer, grammar, limits, text)
        slow = sum(max(0.0, one - SLOW_MASK_SECONDS) for one in seconds)
        row = {"most_ms": max(seconds) * 1e3, "slow_seconds": slow, "is_over": is_over}
        found.setdefault(name, {}).update({f"{which}_{key}": value for key, value in row.items()})
        end = "over a limit" if is_over else "to its end"
        print(
            f"{name}, limits of {which}: at most {max(seconds) * 1e3:.1f} ms a mask, {slow:.2f} s "
            f"of slow ones in {len(seconds)}, {end}",
            flush=True,
        )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
