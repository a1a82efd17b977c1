"""Handlers of Ollama's endpoints: they make generation requests, or answer without the model."""

from tandem.apis.answering import GenerationRequest, GenerationRequests
from tandem.apis.api import Api, Question
from tandem.apis.errors import ApiError
from tandem.apis.ollama.conversation import chat_of, generated_chat, raw_completion
from tandem.apis.ollama.models import shown
from tandem.apis.ollama.reply import OllamaReply, loaded
from tandem.apis.ollama.schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    ShowRequest,
)
from tandem.engine.messages import ModelInfo
from tandem.foreign_types import Tokenizer


def chat_api(requests: GenerationRequests, model: str) -> Api[OllamaChatRequest]:
    """Return the handler of /api/chat."""

    def made(body: OllamaChatRequest, info: ModelInfo, _: bytes) -> list[GenerationRequest]:
        _require_thinker(body, requests, info, model)
        return requests.chat(chat_of(body), info, trims=body.truncate is not False)

    return Api(
        OllamaChatRequest,
        made,
        lambda body, made, _: OllamaReply(made[0], model, is_chat=True),
        lambda body: None if body.messages else _loaded(body, model, is_chat=True),
    )


def generate_api(requests: GenerationRequests, model: str) -> Api[OllamaGenerateRequest]:
    """Return the handler of /api/generate."""

    def made(body: OllamaGenerateRequest, info: ModelInfo, _: bytes) -> list[GenerationRequest]:
        if body.raw:
            return requests.completions(raw_completion(body), info)
        _require_thinker(body, requests, info, model)
        return requests.chat(generated_chat(body), info)

    def at_once(body: OllamaGenerateRequest) -> dict[str, object] | None:
        has_prompt = body.prompt or body.images or body.system
        return None if has_prompt else _loaded(body, model, is_chat=False)

    return Api(
        OllamaGenerateRequest,
        made,
        lambda body, made, _: OllamaReply(made[0], model, is_chat=False),
        at_once,
    )


def show_question(
    requests: GenerationRequests, tokenizer: Tokenizer, model: str
) -> Question[ShowRequest]:
    """Return the handler of /api/show."""
    return Question(ShowRequest, lambda body, info, _: shown(model, requests, tokenizer, info))


def _loaded(body: OllamaRequest, model: str, *, is_chat: bool) -> dict[str, object]:
    is_unloaded = body.keep_alive in (0, "0", "0s")
    return loaded(model, is_chat=is_chat, is_unloaded=is_unloaded)


def _require_thinker(
    body: OllamaRequest, requests: GenerationRequests, info: ModelInfo, model: str
) -> None:
    """Raise `ApiError` for `think` if the model does not reason; clients retry without `think`."""
    if body.think and not requests.capabilities(info)["thinking"]["supported"]:
        raise ApiError(400, f'"{model}" does not support thinking', param="think")
