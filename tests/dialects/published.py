"""Published chat templates, and the conversation that each of them writes."""

from dataclasses import dataclass, field
from typing import Any

from tests.conftest import REPOSITORY

TEMPLATES = REPOSITORY / "tests" / "data" / "chat_templates"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "deep": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "where": {"type": "object"},
                    "code": {"type": "string"},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Tells the time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
FIRST: dict[str, Any] = {
    "text": "naïve <b>\nline 🙂", "count": 5, "deep": True, "tags": ["a", "b"],
    "where": {"x": 1.5}, "code": "17",
}  # fmt: skip
QUESTION = {"role": "user", "content": "What is it?"}


@dataclass(frozen=True)
class Published:
    """A template, the name of its family, and the parts of an answer that it writes."""

    file: str
    family: str
    end: str
    """The text with which the model ends its answer."""
    options: dict[str, Any] = field(default_factory=dict)
    has_reasoning: bool = True
    has_content: bool = True
    """Whether text may stand beside calls."""
    num_calls: int = 2
    arguments: dict[str, Any] = field(default_factory=lambda: dict(FIRST))


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in FIRST.items() if name not in names}


PUBLISHED = [
    Published("Qwen-Qwen3-0.6B", "hermes", "<|im_end|>"),
    Published("Qwen3-Coder", "tagged", "<|im_end|>", has_reasoning=False),
    Published("Qwen3.5-4B", "tagged", "<|im_end|>"),
    Published("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "tagged", "<|im_end|>"),
    Published("openai-gpt-oss-120b", "harmony", "<|return|>", has_content=False, num_calls=1),
    Published("GLM-4.6", "glm", "<|observation|>"),
    Published("GLM-4.7-Flash", "glm", "<|observation|>"),
    Published("deepseek-ai-DeepSeek-V3.1", "deepseek-v3", "<｜end▁of▁sentence｜>",
              has_reasoning=False),
    Published("deepseek-ai-DeepSeek-V3.2", "deepseek-v3.2", "<｜end▁of▁sentence｜>",
              {"thinking": True}),
    Published("deepseek-ai-DeepSeek-V4", "deepseek-v3.2", "<｜end▁of▁sentence｜>",
              {"thinking": True}),
    Published("moonshotai-Kimi-K2", "kimi", "<|im_end|>", has_reasoning=False),
    Published("Kimi-K3", "kimi-k3", "<|end_of_msg|>"),
    Published("inclusionai-ling-3.0-flash", "glm", "<|role_end|>"),
    Published("deepseek-ai-DeepSeek-V4-Flash-0731", "deepseek-v3.2", "<｜end▁of▁sentence｜>",
              {"thinking": True}),
    Published("StepFun3.5-Flash", "tagged", "<|im_end|>"),
    Published("MiniMax-M1", "minimax-m1", "<end_of_sentence>", has_reasoning=False,
              has_content=False),
    Published("MiniMax-M2", "minimax", "[e~["),
    Published("MiniMax-M3", "minimax-m3", "[e~[", {"thinking_mode": "enabled"}),
    Published("Mistral-Small-3.2-24B-Instruct-2506", "mistral", "</s>", has_reasoning=False,
              has_content=False),
    Published("mistralai-Mistral-Nemo-Instruct-2407", "mistral-v3", "</s>", has_reasoning=False,
              has_content=False),
    Published("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "</s>", has_reasoning=False),
    Published("google-gemma-4-31B-it", "gemma4", "<|tool_response>", {"enable_thinking": True},
              has_content=False),
    Published("LFM2.5-8B-A1B", "lfm2", "<|im_end|>", arguments=_without("text")),
    Published("ibm-granite-granite-4.0", "hermes", "<|end_of_text|>", has_reasoning=False),
    Published("tencent-Hy3", "hunyuan", "<｜hy_eos:opensource｜>", {"reasoning_effort": "high"}),
]  # fmt: skip
