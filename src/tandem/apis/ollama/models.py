"""Response bodies of Ollama's API that describe the served model: /api/tags, /api/ps, /api/show."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime

from tandem.apis.answering import GenerationRequests
from tandem.apis.ollama.reply import timestamp
from tandem.engine.messages import ModelInfo
from tandem.foreign_types import Tokenizer

_Json = dict[str, object]
FOLLOWED_VERSION = "0.14.2"
"""The version of Ollama's API that Tandem follows. Editors refuse servers with a lower version, and
Tandem's own version says nothing about that API."""
# The model stays loaded while the server runs, but clients parse a time.
_FOREVER = datetime(2318, 1, 1).timestamp()


def listed(
    names: Sequence[str], info: ModelInfo | None, memory: Mapping[str, int], since: float
) -> _Json:
    """Return the body of /api/tags: the one model under each of its names.

    `memory` has the bytes used in `host` and `gpu` memory. `since` is the Unix time that the body
    gives as the time of modification.
    """
    models = [_entry(name, info, memory) | {"modified_at": timestamp(since)} for name in names]
    return {"models": models}


def running(
    name: str, info: ModelInfo | None, memory: Mapping[str, int], context: int | None
) -> _Json:
    """Return the body of /api/ps: the loaded model, or an empty list before it is loaded."""
    if info is None:
        return {"models": []}
    entry = _entry(name, info, memory) | {
        "expires_at": timestamp(_FOREVER),
        "size_vram": memory.get("gpu", 0),
        "context_length": context or 0,
    }
    return {"models": [entry]}


def shown(
    name: str, requests: GenerationRequests, tokenizer: Tokenizer, info: ModelInfo
) -> dict[str, object]:
    """Return the body of /api/show."""
    kind = info.model_type
    template = tokenizer.chat_template
    known: _Json = {
        "general.architecture": kind,
        "general.basename": name,
        f"{kind}.context_length": requests.limit(info),
        f"{kind}.expert_count": info.num_experts,
        f"{kind}.vocab_size": info.vocabulary,
    }
    return {
        "modelfile": "",
        "parameters": "",
        "license": "",
        "template": template if isinstance(template, str) else "",
        "details": _details(info),
        "model_info": {key: value for key, value in known.items() if value is not None},
        "capabilities": _capabilities(requests, info),
    }


def _capabilities(requests: GenerationRequests, info: ModelInfo) -> list[str]:
    found = requests.capabilities(info)
    words = {"tools": "tools", "thinking": "thinking", "image_input": "vision"}
    return ["completion", *(word for name, word in words.items() if found[name]["supported"])]


def _entry(name: str, info: ModelInfo | None, memory: Mapping[str, int]) -> _Json:
    return {
        "name": name,
        "model": name,
        # There are no manifests here, but clients identify models by their digest.
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "size": memory.get("host", 0) + memory.get("gpu", 0),
        "details": _details(info),
    }


def _details(info: ModelInfo | None) -> _Json:
    family = "" if info is None else info.model_type
    return {
        "parent_model": "",
        "format": "tandem",
        "family": family,
        "families": [family] if family else None,
        "parameter_size": "",
        "quantization_level": "",
    }
