"""Decode speed with speculation over without: python -m benchmarks.generation.speculation

Prompts that repeat, edit and summarise a given text, or code, and prompts for free prose; greedy.
Each answer with speculation must have the tokens of the one without. Speeds are of decode steps;
the first round, which records steps of new sizes, is listed separately.
"""

import argparse
import json
from statistics import median

import tandem
from tandem.cli.model_choice import ModelChoice, load_model_and_tokenizer
from tandem.devices.options import OffloadOptions
from tandem.generate.generator import Generator
from tandem.policy.speculation.free_drafts import FreeDrafts
from tandem.policy.speculation.prompt_lookup import PromptLookup

TEXT = (
    "The lighthouse stood on a small rock far from the shore. Every evening the keeper climbed the "
    "stairs and lit the lamp. Ships from many countries passed by, and their crews waved. In "
    "winter the storms were so strong that nobody could reach the rock for weeks."
)
CODE = '''def mean(values):
    """Return the mean of some numbers."""
    total = 0
    for value in values:
        total = total + value
    return total / len(values)
'''
PROMPTS = {
    "repeat": f"Repeat this text word for word:\n\n{TEXT}",
    "edit": f"Repeat this text, but write 'tower' in place of 'lighthouse':\n\n{TEXT}",
    "summary": f"Summarise this text in three sentences:\n\n{TEXT}",
    "code": f"Rename the variable total to result in this code:\n\n{CODE}",
    "story": "Tell me a story about a dragon and a baker.",
    "essay": "Explain why the sky is blue and sunsets are red.",
}
FREE = ("story", "essay")


def main() -> None:
    """Measure and print a table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--expert-dtype", default="int4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    choice = ModelChoice(model=args.model)
    offload = OffloadOptions(expert_dtype=args.expert_dtype)
    model, tokenizer = load_model_and_tokenizer(choice, offload, quiet=True, dense_dtype="auto")
    generators = {name: Generator(model, tokenizer, speculate=name) for name in ("none", "auto")}
    speculation = generators["auto"].speculation
    assert speculation is not None
    for way in speculation.ways:
        if isinstance(way, FreeDrafts):
            way.make_drafter = PromptLookup  # the same answers come again: none is looked up
    found = {
        name: measured(generators, prompt, args.rounds, args.tokens)
        for name, prompt in PROMPTS.items()
    }
    print(f"{'prompt':<8} {'none':>7} {'auto':>7} {'ratio':>6} {'first':>6} {'drafted':>8} kept")
    for name, row in found.items():
        print(
            f"{name:<8} {row['none']:7.1f} {row['auto']:7.1f} {row['ratio']:6.2f} "
            f"{row['first']:6.2f} {row['drafted']:8.0f} {row['kept']:.0f}"
        )
    print(json.dumps({"tandem": tandem.__version__, "prompts": found}))


def measured(
    generators: dict[str, Generator], prompt: str, rounds: int, num_tokens: int
) -> dict[str, float]:
    """Answer one prompt both ways in turn; return tokens per second and median ratios."""
    speeds: dict[str, list[float]] = {name: [] for name in generators}
    drafted = kept = 0
    for _ in range(rounds + 1):
        tokens = []
        for name, generator in generators.items():
            (answer,) = generator.generate(
                [[{"role": "user", "content": prompt}]], max_new_tokens=num_tokens, temperature=0
            )
            speeds[name].append(answer.decode_tokens_per_second)
            tokens.append(answer.token_ids)
            drafted, kept = answer.drafted_tokens, answer.accepted_tokens
        assert tokens[0] == tokens[1], "speculation changed the answer"
    ratios = [b / a for a, b in zip(speeds["none"], speeds["auto"], strict=True)]
    return {
        "none": median(speeds["none"][1:]),
        "auto": median(speeds["auto"][1:]),
        "ratio": median(ratios[1:]),
        "first": ratios[0],
        "drafted": drafted,
        "kept": kept,
    }


if __name__ == "__main__":
    main()
