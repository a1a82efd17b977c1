"""Replays a coding agent's turns against a server: python -m benchmarks.server.agent

A prefix of 8,000 tokens with tools, then turns of 100 to 300 new tokens, each a tool's result or a
question, over /v1/messages, which such agents use. The result is the number of computed prompt
tokens over the number of new ones. The models are random with 4 layers and a token per character,
so that a prefix of 8,000 tokens is short: one of each `--architectures`, which attend to all
tokens, to windows, with latents, and with states of linear attention. The last line is JSON.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY
from tests.server.checkpoint import save_served_checkpoint
from tests.server.running import RunningServer, running_server

_TEXT = (REPOSITORY / "tests/data/wikitext_4096.txt").read_text(encoding="utf-8")
_TEXT = _TEXT.encode("ascii", "ignore").decode()
_TEMPLATE = REPOSITORY / "tests/data/chat_templates/Qwen-Qwen3-0.6B.jinja"
_BEGINNING_TOKENS, _CONTEXT = 8000, 131_072
_ARCHITECTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
_TOOL = {
    "name": "read_file",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}


def save_model(directory: Path, architecture: str) -> Path:
    """Write the model, with Qwen3's chat template."""
    save_served_checkpoint(directory, architecture, context=_CONTEXT, num_hidden_layers=4)
    (directory / "chat_template.jinja").write_text(_TEMPLATE.read_text("utf-8"), "utf-8")
    return directory


def turns_of(server: RunningServer, num_turns: int) -> dict[str, Any]:
    """Run the turns; return the numbers of computed and of new tokens."""
    chance = random.Random(3)
    system = (_TEXT * 3)[:_BEGINNING_TOKENS]
    messages: list[dict[str, Any]] = []
    computed = new = before = 0
    for turn in range(num_turns):
        messages.append({"role": "user", "content": new_content(chance, turn, messages)})
        body = {
            "system": [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
            "tools": [_TOOL], "messages": messages, "max_tokens": 16, "temperature": 0.7,
        }  # fmt: skip
        reply = server.ask("POST", "/v1/messages", body)
        assert reply.status == 200, reply.body
        usage = reply.json["usage"]
        made = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        prompt = made + usage["cache_read_input_tokens"]
        computed, new, before = computed + made, new + prompt - before, prompt
        messages.append({"role": "assistant", "content": answer(reply.json["content"], turn)})
    return {
        "turns": num_turns, "prompt_tokens": before, "computed_tokens": computed,
        "new_tokens": new, "computed_over_new": computed / new,
    }  # fmt: skip


def new_content(chance: random.Random, turn: int, messages: list[dict[str, Any]]) -> Any:
    """Return a tool's result if the last answer called one, otherwise a question."""
    first = chance.randrange(len(_TEXT))
    text = (_TEXT * 2)[first : first + chance.randrange(100, 300)]
    if messages and messages[-1]["content"][-1]["type"] == "tool_use":
        return [{"type": "tool_result", "tool_use_id": f"toolu_{turn - 1}", "content": text}]
    return text


def answer(content: list[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
    """Return the model's answer; four of five have a call, as an agent's model writes."""
    text_blocks = [block for block in content if block["type"] == "text"]
    if turn % 5 != 4:
        arguments = {"path": f"src/file_{turn}.py"}
        text_blocks.append(
            {"type": "tool_use", "id": f"toolu_{turn}", "name": "read_file", "input": arguments}
        )
    return text_blocks or [{"type": "text", "text": "."}]


def main() -> None:
    """Serve the model and run the turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--architectures", nargs="+", default=_ARCHITECTURES)
    options = parser.parse_args()
    found = {}
    for architecture in options.architectures:
        with tempfile.TemporaryDirectory() as directory:
            model = save_model(Path(directory) / "agent", architecture)
            with running_server(model, "--kv-disk", "4GiB", cache=Path(directory)) as server:
                found[architecture] = turns_of(server, options.turns)
        print(f"{architecture}: {found[architecture]['computed_over_new']:.3f}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
