"""Tries llm: prompts, tools and schemas from the command line."""

# /// script
# dependencies = ["llm"]
# ///

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.clients.tasks import PERSON, QUESTION, check_person
from tests.clients.trying import Served, report, run_command

_TOOL = '''
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"
'''
_SETTING = """
- model_id: tandem
  model_name: {name}
  api_base: {base_url}
  supports_schema: true
  supports_tools: true
- model_id: tandem-completion
  model_name: {name}
  api_base: {base_url}
  completion: true
"""


def models(served: Served) -> None:
    done = _llm("openai", "endpoint", served.base_url, "--models", home=tempfile.gettempdir())
    assert done == served.name


def prompt(served: Served) -> None:
    assert _ask(served, QUESTION, "-s", "Be brief.", "-o", "temperature", "0")


def prompt_without_stream(served: Served) -> None:
    assert _ask(served, QUESTION, "--no-stream", "-o", "seed", "1")


def conversation(served: Served) -> None:
    with tempfile.TemporaryDirectory() as home:
        assert _ask(served, QUESTION, home=home)
        assert _ask(served, "And in Oslo?", "-c", home=home)


def schema(served: Served) -> None:
    text = _ask(served, "Invent a person", "--schema", json.dumps(PERSON), max_tokens=80)
    check_person(json.loads(text))


def functions(served: Served) -> None:
    assert _ask(served, QUESTION, "--functions", _TOOL, "--td", max_tokens=40)


def completion(served: Served) -> None:
    assert _ask(served, "Once upon a time", model="tandem-completion")


def _ask(
    served: Served, text: str, *flags: str, model: str = "tandem", max_tokens: int = 12,
    home: str | None = None,
) -> str:  # fmt: skip
    """Return the output of the command, which has the server in its settings."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(home or temporary)
        setting = _SETTING.format(name=served.name, base_url=served.base_url)
        (place / "extra-openai-models.yaml").write_text(setting, encoding="utf-8")
        limit = ["-o", "max_tokens", str(max_tokens)]
        return _llm("-m", model, text, *flags, *limit, home=str(place))


def _llm(*words: str, home: str) -> str:
    return run_command("llm", *words, env={**os.environ, "LLM_USER_PATH": home}).strip()


if __name__ == "__main__":
    tries = [models, prompt, prompt_without_stream, conversation, schema, functions, completion]
    sys.exit(report("llm", tries))
