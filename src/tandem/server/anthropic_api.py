"""Anthropic's Messages API, as the server knows an API."""

from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from tandem.apis.anthropic.conversation import as_chat, has_cache_marks
from tandem.apis.anthropic.reply import MessageReply
from tandem.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from tandem.apis.api import Api
from tandem.engine.messages import ModelInfo
from tandem.server.event_stream import named_event
from tandem.server.service import Server, is_long


@dataclass(frozen=True, slots=True)
class MessagesApi:
    """What Anthropic's clients ask."""

    server: Server
    messages: Api[MessagesRequest]

    async def count_tokens(self, request: Request) -> Response:
        """Answer /v1/messages/count_tokens."""
        server = self.server
        with server.counted("count_tokens"):
            body, info = await server.read(request, CountTokensRequest)
            count = await server.in_thread(self._count, body, info, is_long=is_long(request))
        server.metrics.requests.labels("count_tokens", "200").inc()
        return JSONResponse({"input_tokens": count})

    def _count(self, body: CountTokensRequest, info: ModelInfo) -> int:
        return len(self.server.generation_requests.chat_ids(as_chat(body), info))


def messages_api(server: Server) -> MessagesApi:
    """Return /v1/messages and what belongs to it."""
    requests = server.generation_requests
    return MessagesApi(
        server,
        Api(
            endpoint="messages",
            body=MessagesRequest,
            requests=lambda body, info: requests.chat(as_chat(body), info),
            reply=lambda body, requests: MessageReply(
                requests[0], server.model, has_cache_marks=has_cache_marks(body)
            ),
            encode=named_event,
        ),
    )
