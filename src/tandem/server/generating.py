"""The endpoints that generate and keep nothing, as the server knows them."""

from tandem.apis.anthropic.conversation import as_chat, has_cache_marks
from tandem.apis.anthropic.reply import MessageReply
from tandem.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from tandem.apis.api import Api
from tandem.apis.replies import ChatReply, CompletionReply
from tandem.apis.schemas import ChatRequest, CompletionRequest
from tandem.engine.messages import ModelInfo
from tandem.server.event_stream import DONE, event, named_event
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


def messages_api(server: Server) -> Api[MessagesRequest]:
    """Return Anthropic's /v1/messages."""
    chat = server.generation_requests.chat
    return Api(
        endpoint="messages",
        body=MessagesRequest,
        requests=lambda body, info: chat(as_chat(body), info),
        reply=lambda body, requests: MessageReply(
            requests[0], server.model, has_cache_marks=has_cache_marks(body)
        ),
        encode=named_event,
    )


def count_tokens(server: Server, body: CountTokensRequest, info: ModelInfo) -> dict[str, object]:
    """Answer /v1/messages/count_tokens."""
    return {"input_tokens": len(server.generation_requests.chat_ids(as_chat(body), info))}
