"""A chat on a terminal: the conversation grows, and only its new part is computed.

python examples/chat.py path/to/model --expert-dtype int4
"""

import argparse
import sys

import tandem  # before Transformers, whose torch would start threads that spin

from transformers import AutoTokenizer  # isort: skip


def main() -> None:
    """Answer each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint directory")
    parser.add_argument("--expert-dtype", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    flags = parser.parse_args()

    model = tandem.load(flags.model, expert_dtype=flags.expert_dtype)
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    # The generator keeps the KV cache of the last conversation.
    generator = tandem.Generator(model, tokenizer)

    messages: list[dict[str, str]] = []
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        pieces = []
        for piece in generator.stream(messages, max_new_tokens=flags.max_new_tokens):
            print(piece, end="", flush=True)
            pieces.append(piece)
        print()
        messages.append({"role": "assistant", "content": "".join(pieces)})


if __name__ == "__main__":
    main()
