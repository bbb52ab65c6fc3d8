"""`/v1/responses`: made, read again, deleted, counted. What is kept is `gateway.kept_responses`.

An answer is kept after its last token and before its client hears that it is whole, so that its
name works as soon as it is known. Reading one costs nothing, however often.
"""

from collections.abc import Callable
from urllib.parse import parse_qsl

import msgspec

from core.errors import Code, refuse
from gateway import responses
from gateway.api.answers import AnswerLimits
from gateway.api.endpoint import Edge, Endpoint
from gateway.api.faces import OPENAI
from gateway.api.generate import GenerateEndpoint, Kind
from gateway.api.replayed import Replayed
from gateway.api.responder import Receive, Responder, Scope
from gateway.api.shortener import Shortener
from gateway.auth import Identity
from gateway.conversation import Answer, Conversation, StreamWriter
from gateway.images import check_images
from gateway.kept_responses import KeptBody, KeptResponses
from gateway.relay.call import Call
from gateway.relay.relay import Relay

RESPONSES = "/v1/responses/"
PAGE_DEFAULT, PAGE_MAX = 20, 100
QUERY_FIELDS_MAX = 16


def _never(*_: object) -> None:
    raise AssertionError("each call's kind is its own")


async def _completed(
    kept: KeptResponses, shortener: Shortener, identity: Identity, conversation: Conversation
) -> Conversation:
    ask = conversation.ask
    assert ask is not None
    before = await kept.items(identity.tenant.id, ask.previous_id) if ask.previous_id else ()
    whole = responses.continued(conversation, before)
    return await shortener.fitting(identity, whole) if ask.shorten else whole


class _Telling:
    """How one call's answer is told, and kept."""

    def __init__(self, kept: KeptResponses, call: Call, now_ms: Callable[[], int]) -> None:
        self._kept = kept
        self._call = call
        self._now_ms = now_ms
        self._ended_ms = call.created_ms
        self._writer: responses.ResponsesStream | None = None
        self._is_kept = False

    @property
    def kind(self) -> Kind:
        """As the edge takes it."""
        return Kind(
            "responses", OPENAI, responses.parse_response, self.writer, self.encode, self.keep
        )

    def writer(self, conversation: Conversation, request_id: str, created_ms: int) -> StreamWriter:
        """Its stream."""
        self._writer = responses.ResponsesStream(
            conversation, request_id=request_id, created_ms=created_ms
        )
        return self._writer

    def encode(
        self, answer: Answer, conversation: Conversation, request_id: str, created_ms: int
    ) -> bytes:
        """Its body."""
        return responses.response_json(
            answer,
            conversation,
            request_id=request_id,
            created_ms=created_ms,
            ended_ms=self._ended_ms,
            kept=self._is_kept,
        )

    async def keep(self, answer: Answer, request_id: str) -> None:
        """Keep it, if that was asked for."""
        call = self._call
        ask = call.conversation.ask
        assert ask is not None
        self._ended_ms = self._now_ms()
        if not ask.keep:
            self._note(is_kept=False)
            return
        name = responses.response_id(request_id)
        if ask.again:
            self._note(is_kept=await self._kept.holds(call.identity.tenant.id, name))
            return
        self._is_kept = True  # so the response that is kept says
        body = KeptBody(
            response=msgspec.Raw(
                self.encode(answer, call.conversation, request_id, call.created_ms)
            ),
            input=responses.named(ask.items, name),
            output=responses.answer_items(answer, call.conversation, request_id),
        )
        tenant_id = call.identity.tenant.id
        self._note(is_kept=await self._kept.keep(tenant_id, name, ask.previous_id, body))

    def _note(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        if self._writer is not None:
            self._writer.kept, self._writer.ended_ms = is_kept, self._ended_ms


class ResponsesEndpoint(GenerateEndpoint):
    """`POST /v1/responses`."""

    def __init__(
        self,
        edge: Edge,
        relay: Relay,
        kept: KeptResponses,
        limits: AnswerLimits,
        shortener: Shortener,
    ) -> None:
        kind = Kind("responses", OPENAI, responses.parse_response, _never, _never)  # type: ignore[arg-type] # never called: `kind_of` makes each call's own
        super().__init__(edge, relay, kind, limits)
        self._kept = kept
        self._shortener = shortener

    async def completed(self, identity: Identity, conversation: Conversation) -> Conversation:
        """With the turns of what it continues, or with as many as fit if that is asked for."""
        return await _completed(self._kept, self._shortener, identity, conversation)

    async def _replay(
        self, call: Call, replayed: Replayed, scope: Scope, respond: Responder
    ) -> None:
        """What was deleted since is not kept again."""
        ask = call.conversation.ask
        assert ask is not None
        again = msgspec.structs.replace(
            call.conversation, ask=msgspec.structs.replace(ask, again=True)
        )
        call = msgspec.structs.replace(call, conversation=again)
        await super()._replay(call, replayed, scope, respond)

    def kind_of(self, call: Call) -> Kind:
        """One that keeps what it tells."""
        return _Telling(self._kept, call, self.edge.now_ms).kind


class CountResponseEndpoint(Endpoint):
    """`POST /v1/responses/input_tokens`. Nothing is admitted or reserved."""

    def __init__(self, edge: Edge, kept: KeptResponses, shortener: Shortener) -> None:
        super().__init__(edge, name="count_response_tokens", face=OPENAI)
        self._kept = kept
        self._shortener = shortener

    async def answer(self, scope: Scope, receive: Receive, respond: Responder) -> None:
        """The count."""
        identity = await self.edge.auth.authenticate(scope["headers"])
        asked = responses.parse_input_tokens(await self.body(scope, receive))
        conversation = await _completed(self._kept, self._shortener, identity, asked)
        check_images(conversation.images, self.edge.limits.images)
        count = await self._shortener.count(identity, conversation)
        body = responses.input_tokens_json(count)
        await respond.whole(200, body, {}, self.edge.new_request_id())


class KeptResponseEndpoint(Endpoint):
    """`GET` and `DELETE /v1/responses/{id}`, and what is below it."""

    method = None

    def __init__(self, edge: Edge, kept: KeptResponses) -> None:
        super().__init__(edge, name="kept_response", face=OPENAI)
        self._kept = kept

    async def answer(self, scope: Scope, receive: Receive, respond: Responder) -> None:  # noqa: ARG002 - nothing here takes a body
        """As the method and the rest of the path say."""
        tenant_id = (await self.edge.auth.authenticate(scope["headers"])).tenant.id
        name, _, below = scope["path"].removeprefix(RESPONSES).partition("/")
        match scope["method"], below:
            case "GET", "":
                body = await self._response(tenant_id, name, _query(scope))
            case "GET", "input_items":
                body = await self._input_items(tenant_id, name, _query(scope))
            case "DELETE", "":
                await self._kept.delete(tenant_id, name)
                body = responses.deleted_json(name)
            case "POST", "cancel":
                await self._kept.find(tenant_id, name)
                message = "Only a response made with background=true can be cancelled."
                raise refuse(Code.UNSUPPORTED, message, param="response_id")
            case _, "" | "input_items" | "cancel":
                message = f"{scope['method']} is not allowed here."
                raise refuse(Code.METHOD_NOT_ALLOWED, message)
            case _:
                raise refuse(Code.NOT_FOUND, "There is nothing at this path.")
        await respond.whole(200, body, {}, self.edge.new_request_id())

    async def _response(self, tenant_id: str, name: str, query: dict[str, str]) -> bytes:
        if query.pop("stream", "false") != "false" or "starting_after" in query:
            message = "stream: a kept response is not streamed again here; read it whole"
            raise refuse(Code.UNSUPPORTED, message, param="stream")
        _refuse_others(query)
        return bytes((await self._kept.find(tenant_id, name)).response)

    async def _input_items(self, tenant_id: str, name: str, query: dict[str, str]) -> bytes:
        limit = query.pop("limit", str(PAGE_DEFAULT))
        digits = limit.isascii() and limit.isdigit() and len(limit) <= len(str(PAGE_MAX))
        if not digits or not 1 <= int(limit) <= PAGE_MAX:
            message = f"limit: must be an integer from 1 to {PAGE_MAX}"
            raise refuse(Code.BAD_REQUEST, message, param="limit")
        order = query.pop("order", "desc")
        if order not in {"asc", "desc"}:
            raise refuse(Code.BAD_REQUEST, "order: must be 'asc' or 'desc'", param="order")
        after = query.pop("after", None)
        _refuse_others(query)
        kept = await self._kept.find(tenant_id, name)
        page = responses.items_json(
            kept.input, limit=int(limit), newest_first=order == "desc", after=after
        )
        if page is None:
            raise refuse(Code.BAD_REQUEST, "after: names no item of this response", param="after")
        return page


def _query(scope: Scope) -> dict[str, str]:
    text = scope["query_string"].decode("latin-1")
    try:
        return dict(parse_qsl(text, max_num_fields=QUERY_FIELDS_MAX))
    except ValueError:
        raise refuse(Code.BAD_REQUEST, "The query has too many fields.") from None


def _refuse_others(query: dict[str, str]) -> None:
    """`include` changes nothing: what was kept is all that there is."""
    others = [name for name in query if name not in {"include", "include[]"}]
    if others:
        path = others[0][:64]
        raise refuse(Code.BAD_REQUEST, f"Unrecognized query parameter: {path}", param=path)
