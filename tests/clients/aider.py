"""Tries aider (pair programming in a terminal) with single messages."""

# /// script
# dependencies = ["aider-chat"]
# ///

import sys
import tempfile
from pathlib import Path

from tests.clients.trying import Served, report, run_command

_QUIET = (
    "--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings",
    "--analytics-disable", "--no-show-release-notes", "--no-detect-urls", "--no-pretty",
)  # fmt: skip


def question(served: Served) -> None:
    assert "Tokens:" in _aider(served, "--chat-mode", "ask", "--message", "What is two and two?")


def question_without_stream(served: Served) -> None:
    flags = ("--chat-mode", "ask", "--no-stream", "--message", "What is two and two?")
    assert "Tokens:" in _aider(served, *flags)


def _aider(served: Served, *flags: str) -> str:
    """Return the command's output, run in an empty directory."""
    settings = f"- name: openai/{served.name}\n  extra_params:\n    max_tokens: 12\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.yml"
        file.write_text(settings, encoding="utf-8")
        output = run_command(
            "aider", "--model", f"openai/{served.name}",
            "--openai-api-base", served.base_url, "--openai-api-key", "none",
            "--model-settings-file", str(file), "--map-tokens", "0", *_QUIET, *flags, cwd=folder,
        )  # fmt: skip
    assert "litellm." not in output, output  # its errors
    return output


if __name__ == "__main__":
    sys.exit(report("aider-chat", (question, question_without_stream)))
