"""`POST` endpoints that generate: chat completions, completions, messages."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from core.errors import RefusedError
from core.idempotency import Claim
from core.scopes import bounds_of
from gateway import anthropic, openai
from gateway.answer_cache import asked_of
from gateway.api.answers import AnswerLimits, Keep, Telling
from gateway.api.endpoint import Edge, Endpoint
from gateway.api.faces import ANTHROPIC, OPENAI, Face
from gateway.api.replayed import Replayed
from gateway.api.responder import Receive, Responder, Scope
from gateway.auth import Identity
from gateway.conversation import Answer, Conversation, StreamWriter
from gateway.hints import hints_of
from gateway.http_protocol import client_of
from gateway.idempotency import REPLAYED
from gateway.images import check_images
from gateway.patience import bounded, patience, shortened
from gateway.relay.call import Call
from gateway.relay.exchange import Exchange
from gateway.relay.relay import Relay
from gateway.replay import Keeping, KeptAnswer
from gateway.route_index import is_allowed, not_found

REPLAY_S = 60.0


class Kind(NamedTuple):
    """One generating endpoint of one dialect. Times are Unix milliseconds.

    `keep` is given each whole answer before its client hears that it is whole.
    """

    name: str
    face: Face
    parse: Callable[[bytes], Conversation]
    writer: Callable[[Conversation, str, int], StreamWriter]
    encode: Callable[[Answer, Conversation, str, int], bytes]
    keep: Keep | None = None


CHAT = Kind(
    "chat_completions",
    OPENAI,
    openai.parse_chat,
    lambda conversation, request_id, created_ms: openai.OpenAIChatStream(
        conversation, request_id=request_id, created_ms=created_ms
    ),
    lambda answer, conversation, request_id, created_ms: openai.chat_json(
        answer, conversation, request_id=request_id, created_ms=created_ms
    ),
)
COMPLETIONS = Kind(
    "completions",
    OPENAI,
    openai.parse_completion,
    lambda conversation, request_id, created_ms: openai.OpenAICompletionStream(
        conversation, request_id=request_id, created_ms=created_ms
    ),
    lambda answer, conversation, request_id, created_ms: openai.completion_json(
        answer, conversation, request_id=request_id, created_ms=created_ms
    ),
)
MESSAGES = Kind(
    "messages",
    ANTHROPIC,
    anthropic.parse_messages,
    lambda conversation, request_id, _: anthropic.AnthropicStream(
        conversation, request_id=request_id
    ),
    lambda answer, conversation, request_id, _: anthropic.message_json(
        answer, conversation, request_id=request_id
    ),
)


class GenerateEndpoint(Endpoint):
    """Opens an exchange and tells its answer."""

    def __init__(self, edge: Edge, relay: Relay, kind: Kind, limits: AnswerLimits) -> None:
        super().__init__(edge, name=kind.name, face=kind.face)
        self._relay = relay
        self._kind = kind
        self._limits = limits

    async def answer(self, scope: Scope, receive: Receive, respond: Responder) -> None:
        """From the headers to the last byte."""
        received_s = asyncio.get_running_loop().time()
        headers = scope["headers"]
        identity = await self.edge.auth.authenticate(headers)
        now_ms = self.edge.now_ms()
        tenant_ms_max = identity.tenant.bounds.deadline_ms_max
        given = patience(headers, self.edge.limits.patience, tenant_ms_max=tenant_ms_max)
        body = await self.body(scope, receive, whole_ms=given.whole_ms)
        conversation = self._kind.parse(body)
        claim = self.edge.claims.claim(
            headers, method=scope["method"], path=scope["path"], body=body
        )
        # Before what the request names is fetched: its answer needs none of that any more.
        told = await self.edge.claims.told(identity.tenant.id, claim) if claim is not None else None
        if told is None:
            conversation = await self.completed(identity, conversation)
            check_images(conversation.images, self.edge.limits.images)
        given = shortened(
            given, headers, timeout_s=conversation.deadline_s, stream=conversation.stream
        )
        bounds = bounds_of(identity.tenant, identity.key, conversation.model)
        given = bounded(given, bounds.deadline_ms_max)
        call = Call(
            identity=identity,
            renew_identity=lambda: self.edge.auth.again(headers),
            conversation=conversation,
            endpoint=self.name,
            received_s=received_s,
            created_ms=now_ms,
            deadline_ms=now_ms + given.whole_ms,
            patience=given,
            cache=asked_of(headers),
            hints=hints_of(headers, dict(conversation.metadata)),
            keeping=self._keeping(identity, claim, now_ms),
        )
        if told is None:
            await self._tell(call, scope, respond)
        else:
            await self._tell_again(call, told, scope, respond)

    def _keeping(self, identity: Identity, claim: Claim | None, now_ms: int) -> Keeping | None:
        if claim is None:
            return None
        return self.edge.claims.keeping(identity.tenant.id, claim, now_ms)

    async def _tell_again(
        self, call: Call, told: KeptAnswer, scope: Scope, respond: Responder
    ) -> None:
        identity = call.identity
        if not is_allowed(call.conversation.model, identity.tenant, identity.key):
            raise RefusedError(not_found(call.conversation.model))
        respond.more_headers |= REPLAYED
        self.edge.metrics.replays.labels(self.name).inc()
        call = msgspec.structs.replace(call, created_ms=told.created_ms)
        await self._replay(call, Replayed(told), scope, respond)

    async def completed(self, identity: Identity, conversation: Conversation) -> Conversation:  # noqa: ARG002 - of which tenant
        """With what a request only names, fetched. Raises RefusedError."""
        return conversation

    def kind_of(self, call: Call) -> Kind:  # noqa: ARG002 - some kinds are made for one call
        """How this call's answer is told."""
        return self._kind

    async def _tell(self, call: Call, scope: Scope, respond: Responder) -> None:
        exchange = self._relay.open(call)
        exchange.cut_connection = client_of(scope).cut
        await self._answer(call, exchange, scope, respond)

    async def _replay(
        self, call: Call, replayed: Replayed, scope: Scope, respond: Responder
    ) -> None:
        """Everything is there: only a client that takes nothing can keep it."""
        async with asyncio.timeout(REPLAY_S):
            await self._answer(call, replayed, scope, respond)

    async def _answer(
        self,
        call: Call,
        exchange: Exchange | Replayed,
        scope: Scope,
        respond: Responder,
    ) -> None:
        kind, keeping = self.kind_of(call), call.keeping
        telling = Telling(
            exchange,
            respond,
            face=kind.face,
            limits=self._limits,
            now_ms=self.edge.now_ms,
            keep=kind.keep,
            recorder=keeping.recorder if keeping is not None else None,
        )
        stop_watching = client_of(scope).watch(telling.client_left)
        conversation, created_ms = call.conversation, call.created_ms
        try:
            if conversation.stream:
                await telling.stream(
                    conversation,
                    lambda request_id: kind.writer(conversation, request_id, created_ms),
                )
            else:
                await telling.whole(
                    conversation,
                    lambda answer, request_id: kind.encode(
                        answer, conversation, request_id, created_ms
                    ),
                )
        finally:
            stop_watching()
            exchange.abandon()
