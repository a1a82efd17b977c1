"""OpenAI's Responses API, as the server knows an API."""

from fastapi.responses import JSONResponse, Response

from tandem.apis.answering import GenerationRequest
from tandem.apis.api import Api
from tandem.apis.responses.conversation import as_chat, new_messages
from tandem.apis.responses.kept import KeptResponses
from tandem.apis.responses.reply import ResponseReply
from tandem.apis.responses.schemas import CountRequest, ResponsesRequest
from tandem.apis.schemas import ChatRequest, Message
from tandem.engine.messages import ModelInfo
from tandem.server.event_stream import named_event
from tandem.server.service import Server


class ResponsesApi:
    """What clients of the Responses API ask, and the answers that they may go on from."""

    def __init__(self, server: Server) -> None:
        """Answer for a server; nothing is kept yet."""
        self._server = server
        self._kept: dict[bytes, KeptResponses] = {}
        self.api = Api(
            endpoint="responses",
            body=ResponsesRequest,
            requests=self._requests,
            reply=self._reply,
            encode=named_event,
        )

    def count(self, body: CountRequest, info: ModelInfo) -> dict[str, object]:
        """Answer /v1/responses/input_tokens."""
        ids = self._server.generation_requests.chat_ids(self._chat(body), info)
        return {"object": "response.input_tokens", "input_tokens": len(ids)}

    def get(self, response_id: str, owner: bytes) -> Response:
        """Return an answer that was kept of this owner's."""
        kept = self._kept_of(owner).response(response_id)
        return Response(kept, media_type="application/json")

    def delete(self, response_id: str, owner: bytes) -> Response:
        """Forget an answer of this owner's."""
        self._kept_of(owner).drop(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _kept_of(self, owner: bytes) -> KeptResponses:
        """Return what is kept for an owner; each has a limit of its own."""
        return self._kept.setdefault(owner, KeptResponses())

    def _chat(self, body: CountRequest) -> ChatRequest:
        earlier = self._kept_of(body.owner).messages(body.previous_response_id)
        return as_chat(body, earlier, new_messages(body))

    def _requests(self, body: ResponsesRequest, info: ModelInfo) -> list[GenerationRequest]:
        requests = self._server.generation_requests
        return requests.chat(self._chat(body), info, trims=body.truncation == "auto")

    def _reply(self, body: ResponsesRequest, requests: list[GenerationRequest]) -> ResponseReply:
        kept = self._kept_of(body.owner)
        earlier = kept.conversation(body.previous_response_id)

        def keep(response: dict[str, object], answer: Message) -> None:
            if body.store is not False:
                kept.put(response, earlier, [*new_messages(body), answer])

        return ResponseReply(body, requests[0], self._server.model, keep)
