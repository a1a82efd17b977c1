"""A client of `tandem serve`: a streamed answer, then JSON that follows a schema.

tandem serve path/to/model
python examples/server_client.py http://127.0.0.1:8000
"""

import argparse
import os
from typing import Any

from openai import OpenAI

ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=100)
    flags = parser.parse_args()

    key = os.environ.get("TANDEM_API_KEY", "none")
    with OpenAI(base_url=f"{flags.address}/v1", api_key=key) as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
            max_tokens=flags.max_tokens,
            stream=True,
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
        ruled = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Is the sky blue?"}],
            max_tokens=flags.max_tokens,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": ANSWER},
            },
        )
        print(ruled.choices[0].message.content)


if __name__ == "__main__":
    main()
