"""Several prompts at once: a decode step reads each expert once for all of them.

python examples/batch.py path/to/model "Why is the sky blue?" "What is a planner?"
"""

import argparse

import tandem  # before Transformers, whose torch would start threads that spin

from transformers import AutoTokenizer  # isort: skip


def main() -> None:
    """Answer all prompts and print them with their speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint directory")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    flags = parser.parse_args()

    model = tandem.load(flags.model)
    generator = tandem.Generator(model, AutoTokenizer.from_pretrained(flags.model))
    answers = generator.generate(flags.prompts, max_new_tokens=flags.max_new_tokens, temperature=0)
    for prompt, answer in zip(flags.prompts, answers, strict=True):
        print(f"{prompt} -> {answer.text!r} (ended by {answer.finish_reason})")
    tokens = sum(len(answer.token_ids) for answer in answers)
    seconds = max(a.time_to_first_token_seconds + a.decode_seconds for a in answers)
    print(f"{tokens} tokens for {len(answers)} prompts in {seconds:.2f} s")


if __name__ == "__main__":
    main()
