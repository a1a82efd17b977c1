"""Turns each endpoint's bodies into requests and a reply, or answers them without the model."""

from collections.abc import Mapping
from typing import Any

from tandem.apis.answering import GenerationRequest, GenerationRequests
from tandem.apis.anthropic.conversation import as_chat, has_cache_marks
from tandem.apis.anthropic.reply import MessageReply
from tandem.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from tandem.apis.api import Api, Question
from tandem.apis.ollama.endpoints import chat_api, generate_api, show_question
from tandem.apis.replies import ChatReply, CompletionReply
from tandem.apis.responses.conversation import as_chat as responses_chat
from tandem.apis.responses.conversation import new_messages
from tandem.apis.responses.kept import joined, messages_of
from tandem.apis.responses.reply import ResponseReply
from tandem.apis.responses.schemas import CountRequest, ResponsesRequest
from tandem.apis.schemas import ChatRequest, CompletionRequest
from tandem.engine.messages import ModelInfo
from tandem.foreign_types import Tokenizer
from tandem.server.tokens import DetokenizeRequest, TokenizeRequest, detokenized, tokenized

Endpoints = Mapping[str, Api[Any] | Question[Any]]


def endpoints(requests: GenerationRequests, tokenizer: Tokenizer, model: str) -> Endpoints:
    """Return the handler of each endpoint, by the endpoint's name in the metrics.

    Answers give `model` as the model's name.
    """
    return {
        "chat": Api(
            ChatRequest,
            lambda body, info, _: requests.chat(body, info),
            lambda body, made, _: ChatReply(body, made, model),
        ),
        "completions": Api(
            CompletionRequest,
            lambda body, info, _: requests.completions(body, info),
            lambda body, made, _: CompletionReply(body, made, model),
        ),
        "messages": Api(
            MessagesRequest,
            lambda body, info, _: requests.chat(as_chat(body), info),
            lambda body, made, _: MessageReply(
                made[0], model, has_cache_marks=has_cache_marks(body)
            ),
        ),
        "responses": _responses(requests, model),
        "ollama_chat": chat_api(requests, model),
        "ollama_generate": generate_api(requests, model),
        "ollama_show": show_question(requests, tokenizer, model),
        "count_tokens": Question(
            CountTokensRequest,
            lambda body, info, _: {"input_tokens": len(requests.chat_ids(as_chat(body), info))},
        ),
        "input_tokens": _input_tokens(requests),
        "tokenize": Question(
            TokenizeRequest, lambda body, info, _: tokenized(requests, tokenizer, body, info)
        ),
        "detokenize": Question(
            DetokenizeRequest, lambda body, info, _: detokenized(requests, body, info)
        ),
    }


def _chat(body: CountRequest, earlier: bytes) -> ChatRequest:
    return responses_chat(body, messages_of(earlier), new_messages(body))


def _responses(requests: GenerationRequests, model: str) -> Api[ResponsesRequest]:
    def made(body: ResponsesRequest, info: ModelInfo, earlier: bytes) -> list[GenerationRequest]:
        return requests.chat(_chat(body, earlier), info, trims=body.truncation == "auto")

    def reply(
        body: ResponsesRequest, made: list[GenerationRequest], earlier: bytes
    ) -> ResponseReply:
        before = None if body.store is False else joined(earlier, new_messages(body))
        return ResponseReply(body, made[0], model, before)

    return Api(ResponsesRequest, made, reply)


def _input_tokens(requests: GenerationRequests) -> Question[CountRequest]:
    def count(body: CountRequest, info: ModelInfo, earlier: bytes) -> dict[str, object]:
        ids = requests.chat_ids(_chat(body, earlier), info)
        return {"object": "response.input_tokens", "input_tokens": len(ids)}

    return Question(CountRequest, count)
