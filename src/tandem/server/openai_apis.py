"""OpenAI's chats and completions, as the server knows an API."""

from tandem.apis.api import Api
from tandem.apis.replies import ChatReply, CompletionReply
from tandem.apis.schemas import ChatRequest, CompletionRequest
from tandem.server.event_stream import DONE, event
from tandem.server.service import Server


def chat_api(server: Server) -> Api[ChatRequest]:
    """Return /v1/chat/completions."""
    return Api(
        endpoint="chat",
        body=ChatRequest,
        requests=server.generation_requests.chat,
        reply=lambda body, requests: ChatReply(body, requests, server.model, server.tokenizer),
        encode=event,
        done=DONE,
    )


def completion_api(server: Server) -> Api[CompletionRequest]:
    """Return /v1/completions."""
    return Api(
        endpoint="completions",
        body=CompletionRequest,
        requests=server.generation_requests.completions,
        reply=lambda body, requests: CompletionReply(
            body, requests, server.model, server.tokenizer
        ),
        encode=event,
        done=DONE,
    )
