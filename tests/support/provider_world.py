"""A provider that plays back recordings, and generations that ask it."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from core.dispatch import PoolRules
from core.errors import Refusal
from core.limits import LimitRules
from core.money import Price
from core.providers import ProviderSettings, ProviderView, key_context
from core.registry import ProviderModel
from core.secrets import KeyRing
from core.tickets import Admit, Admitted, LimitRefused
from gateway.anthropic.request import parse_messages
from gateway.conversation import Conversation, StreamEvent
from gateway.metrics import Metrics
from gateway.openai.chat_request import parse_chat
from gateway.provider_client import Providers, http_client
from gateway.providers.estimate import prompt_tokens
from gateway.relay.channel import Channel
from gateway.relay.endings import Endings
from gateway.relay.job import Outcome
from gateway.relay.provider_generation import ProviderGeneration
from gateway.relay.provider_job import ProviderParts, provider_job
from gateway.routing import Size
from store.local_dispatch import LocalDispatch

RECORDINGS = Path(__file__).parent / "recordings"
PRICE = Price(
    id="acme-1", input_micro=1_000_000, cached_input_micro=100_000, output_micro=4_000_000
)
RING = KeyRing({"k1": b"k" * 32})
KEY = "sk-acme-secret"
NOW_MS = 1_800_000_000_000
DEADLINE_MS = 60_000

Answer = Callable[[httpx.Request], httpx.Response]


class Recording(msgspec.Struct, frozen=True):
    """What a real server of a version answered to a request."""

    server: str
    path: str
    request: dict[str, Any]
    status: int
    headers: dict[str, str]
    cut: bool
    body: str


def recording(name: str) -> Recording:
    return msgspec.json.decode((RECORDINGS / f"{name}.json").read_bytes(), type=Recording)


def recordings(dialect: str) -> list[str]:
    return sorted(file.stem for file in RECORDINGS.glob(f"{dialect}-*.json"))


def a_provider(dialect: str = "openai", **settings: Any) -> ProviderView:
    base_url = "https://api.acme.test/v1" if dialect == "openai" else "https://api.acme.test"
    key = RING.seal(KEY, context=key_context("acme", dialect, base_url), nonce=b"0" * 12)
    return ProviderView(
        name="acme",
        dialect=dialect,
        base_url=base_url,
        key=key,
        settings=ProviderSettings(**settings),
        version=1,
    )


def a_model(provider: ProviderView) -> ProviderModel:
    return ProviderModel(
        model="house",
        provider=provider.name,
        upstream="smollm2",
        dialect=provider.dialect,
        context_tokens=4096,
        max_output_tokens=0,
        created_ms=0,
        route_version=1,
    )


def asked(body: dict[str, Any], dialect: str = "openai") -> Conversation:
    """As a caller of this dialect asks for it."""
    parse = parse_chat if dialect == "openai" else parse_messages
    return parse(json.dumps({"model": "house", **body}).encode())


def plays(recorded: Recording, pieces: random.Random | None = None) -> Answer:
    """Its bytes, in pieces of random sizes; a cut is a connection that breaks."""

    async def body() -> AsyncIterator[bytes]:
        left = recorded.body.encode()
        while left:
            size = len(left) if pieces is None else pieces.randint(1, 200)
            yield left[:size]
            left = left[size:]
            await asyncio.sleep(0)
        if recorded.cut:
            raise httpx.RemoteProtocolError("peer closed connection without a complete body")

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(recorded.status, headers=recorded.headers, content=body())

    return answer


def says(body: bytes | str, status: int = 200, **headers: str) -> Answer:
    """One body; an event stream unless said otherwise."""
    told = {"content-type": "text/event-stream"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return lambda request: httpx.Response(status, headers=told, content=body)


@dataclass
class FakeTicket:
    """What the dispatcher is told."""

    tokens: int = 0

    def produced(self, output_tokens: int) -> None:
        self.tokens = max(self.tokens, output_tokens)  # a total: less than before says nothing


@dataclass
class FakeHold:
    """Money for so many tokens; None for any number."""

    tokens: int | None = None

    async def spent(self, output_tokens: int) -> bool:
        return self.tokens is not None and output_tokens >= self.tokens


class AloneLimits:
    """A provider's limits as a gateway decides them with Valkey away: by the rules' own twin."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._dispatch = LocalDispatch(PoolRules(), LimitRules(), now_ms)

    async def admit(self, a: Admit) -> Admitted | LimitRefused:
        return await self._dispatch.admit(a)

    async def finish(self, *, ticket: str, tenant: str, **_: Any) -> None:
        await self._dispatch.finish_tenant(tenant, ticket, input_tokens=0, output_total=0)

    async def cancel(self, *, ticket: str, pool: str | None, tenant: str) -> None:
        await self._dispatch.cancel_tenant(tenant, ticket)


@dataclass
class ProviderWorld:
    """One gateway's way to a provider that answers as it is told."""

    answer: Answer
    requests: list[httpx.Request] = field(default_factory=list)
    now_ms: int = NOW_MS
    metrics: Metrics = field(default_factory=Metrics)
    ticket: FakeTicket = field(default_factory=FakeTicket)  # of the newest generation

    def __post_init__(self) -> None:
        transport = httpx.MockTransport(self._serve)
        self.providers = Providers(RING, http_client(transport), unix_s=lambda: self.now_ms / 1000)
        self.parts = ProviderParts(
            providers=self.providers,
            metrics=self.metrics,
            now_ms=lambda: self.now_ms,
            fleet=AloneLimits(lambda: self.now_ms),
            endings=Endings(),
        )

    def generation(
        self,
        conversation: Conversation,
        provider: ProviderView,
        *,
        hold: FakeHold | None = None,
        max_tokens: int = 400,
        deadline_ms: int = DEADLINE_MS,
        request_id: str = "req_local_1",
    ) -> ProviderGeneration:
        job = provider_job(
            conversation,
            request_id=request_id,
            model=a_model(provider),
            provider=provider,
            price=PRICE,
            wanted=Size(
                prompt_tokens=prompt_tokens(conversation),
                max_tokens=conversation.max_tokens or max_tokens,
                choices=conversation.n,
            ),
            deadline_ms=self.now_ms + deadline_ms,
        )
        self.ticket = FakeTicket()
        return ProviderGeneration(
            self.parts, job, ticket=self.ticket, hold=hold or FakeHold(), channel=Channel(100_000)
        )

    def _serve(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.answer(request)


@dataclass
class Heard:
    """All that came of a generation."""

    outcome: Outcome
    events: list[StreamEvent]
    tokens: int  # told with the events
    generation: ProviderGeneration

    @property
    def text(self) -> str:
        return "".join(getattr(event, "text", "") for event in self.events)

    @property
    def arguments(self) -> str:
        return "".join(getattr(event, "arguments", "") for event in self.events)

    @property
    def refusal(self) -> Refusal:
        assert self.outcome.refusal is not None
        return self.outcome.refusal

    @property
    def replica(self) -> str:
        (total,) = self.generation.totals
        return total.replica_id


async def run(generation: ProviderGeneration) -> Heard:
    """To its end, as an exchange does."""
    outcome = await generation.run()
    await generation.stop()
    return await heard(generation, outcome)


async def heard(generation: ProviderGeneration, outcome: Outcome) -> Heard:
    told = await generation._channel.take(0.001)
    events = [event for event, _ in told]
    return Heard(outcome, events, sum(tokens for _, tokens in told), generation)
