"""The way to providers: one HTTP client, a guard and an opened key for each.

A call is read by a task of its own, so that whoever waits for it may be cancelled without
cutting the connection: what the provider will charge may still be worth hearing. What is held
of an answer is bounded, and so is every wait. No proxy, redirect or credential is taken from
the environment.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable

import httpx

from core.providers import ProviderView, key_context
from core.secrets import CannotOpenError, KeyRing
from gateway.providers.faults import AWAY, Fault, FaultError, away, broken, busy, late
from gateway.providers.guard import Guard
from gateway.providers.translate import PATHS, request_headers
from gateway.providers.verdict import refused

_log = logging.getLogger(__name__)

PIECES_MAX = 32  # of one answer, read and not yet taken
REFUSAL_BYTES_MAX = 64 * 1024
ANSWER_BYTES_MAX = 32 * 1024 * 1024  # of one that is not streamed
CONNECTIONS_MAX = 2_048
IDLE_CONNECTIONS_MAX = 128
IDLE_CONNECTION_S = 15.0
WRITE_S = 30.0
TRIES = 2  # of a connection that was closed before any answer: it may have been an old one
OK = 200


def http_client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """The one that providers are called with. A test brings its own transport."""
    limits = httpx.Limits(
        max_connections=CONNECTIONS_MAX,
        max_keepalive_connections=IDLE_CONNECTIONS_MAX,
        keepalive_expiry=IDLE_CONNECTION_S,
    )
    return httpx.AsyncClient(
        transport=transport, limits=limits, trust_env=False, follow_redirects=False
    )


class Call:
    """One request under way. `head` is told when the provider has accepted it."""

    def __init__(
        self, client: httpx.AsyncClient, request: httpx.Request, unix_s: Callable[[], float]
    ) -> None:
        self._client = client
        self._unix_s = unix_s
        self._request = request
        self._pieces: asyncio.Queue[bytes | FaultError] = asyncio.Queue(PIECES_MAX)
        self._reading = asyncio.create_task(self._read())
        self._head: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._over = False

    async def accepted(self) -> str:
        """The answer's content type. Raises FaultError for a refusal, or for none in time."""
        return await asyncio.shield(self._head)

    async def read(self) -> bytes:
        """More of the body; nothing at its end. Raises FaultError, once."""
        if self._over:
            return b""
        piece = await self._pieces.get()
        if isinstance(piece, FaultError):
            self._over = True
            raise piece
        self._over = not piece
        return piece

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Hang up, if it is not over within `grace_s`; one that is leaves its connection."""
        if grace_s:
            await asyncio.wait((self._reading,), timeout=grace_s)
        self._reading.cancel()
        await asyncio.wait((self._reading,))
        if not self._head.done():
            self._head.cancel()
        elif not self._head.cancelled():
            self._head.exception()  # whoever it was for has left

    # The task.

    async def _read(self) -> None:
        try:
            response = await self._send()
            try:
                await self._take(response)
            finally:
                await response.aclose()
        except FaultError as fault:
            await self._fail(fault)
        except httpx.TimeoutException as error:
            await self._fail(late(f"{type(error).__name__} within the answer"))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            await self._fail(broken(f"{type(error).__name__}: {error}"))
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever reads must not wait for ever
            _log.exception("a call to a provider failed by a fault of ours")
            await self._fail(broken(f"a fault of ours: {type(error).__name__}"))

    async def _send(self) -> httpx.Response:
        for left in reversed(range(TRIES)):
            try:
                return await self._client.send(self._request, stream=True)
            except httpx.PoolTimeout as error:
                raise busy("no connection is free") from error
            except httpx.ConnectTimeout as error:
                raise away("it cannot be connected to in time") from error
            except httpx.TimeoutException as error:
                raise late(f"{type(error).__name__} before the answer") from error
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if not left:
                    raise away(f"{type(error).__name__} before the answer: {error}") from error
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                raise away(f"{type(error).__name__}: {error}") from error
        raise AssertionError("the last try returns or raises")

    async def _take(self, response: httpx.Response) -> None:
        if response.status_code != OK:
            body = await _bounded(response.aiter_bytes(), REFUSAL_BYTES_MAX)
            raise refused(response.status_code, response.headers, body, now_s=self._unix_s())
        self._head.set_result(response.headers.get("content-type", ""))
        async for piece in response.aiter_bytes():
            if piece:
                await self._pieces.put(piece)
        await self._pieces.put(b"")

    async def _fail(self, fault: FaultError) -> None:
        if self._head.done():
            await self._pieces.put(fault)
        else:
            self._head.set_exception(fault)


class Providers:
    """Every provider of the last routing view, as this gateway deals with it.

    `unix_s` is for what providers tell as a date; nothing else asks the clock on the wall.
    """

    def __init__(
        self, ring: KeyRing, client: httpx.AsyncClient, *, unix_s: Callable[[], float]
    ) -> None:
        self._ring = ring
        self._client = client
        self._unix_s = unix_s
        self._known: dict[str, ProviderView] = {}
        self._guards: dict[str, Guard] = {}
        self._keys: dict[str, tuple[int, str]] = {}  # opened, of a provider's version

    @property
    def dead_keys(self) -> tuple[str, ...]:
        """Providers that do not take our key, or whose key we cannot open."""
        known = self._known
        return tuple(name for name in sorted(known) if self._is_dead(name))

    def guard(self, provider: ProviderView) -> Guard:
        """Its guard, which forgets what it saw when the provider is changed."""
        known = self._known.get(provider.name)
        if known is not None and known.version >= provider.version:
            return self._guards[provider.name]  # as it is by now: a job may be older
        self._known[provider.name] = provider
        guard = self._guards.setdefault(provider.name, Guard(provider.settings))
        guard.renew(provider.settings)
        return guard

    def forget(self, kept: Iterable[str]) -> None:
        """Drop those that are no longer in the view and have nothing under way."""
        for name in self._guards.keys() - set(kept):
            if not self._guards[name].running:
                del self._guards[name]
                self._known.pop(name, None)
                self._keys.pop(name, None)

    def call(self, provider: ProviderView, body: bytes) -> Call:
        """Send it. Raises FaultError when our own key cannot be opened."""
        settings = provider.settings
        request = self._client.build_request(
            "POST",
            provider.base_url.rstrip("/") + PATHS[provider.dialect],
            content=body,
            headers=request_headers(provider.dialect, self._key(provider)),
            timeout=httpx.Timeout(
                connect=settings.connect_ms / 1000,
                read=settings.idle_ms / 1000,
                write=WRITE_S,
                pool=settings.connect_ms / 1000,
            ),
        )
        request.headers["accept-encoding"] = "identity"
        return Call(self._client, request, self._unix_s)

    async def close(self) -> None:
        """At shutdown."""
        await self._client.aclose()

    def _key(self, provider: ProviderView) -> str | None:
        if provider.key is None:
            return None
        version, key = self._keys.get(provider.name, (-1, ""))
        if version == provider.version:
            return key  # never one that was meant for another address
        context = key_context(provider.name, provider.dialect, provider.base_url)
        try:
            key = self._ring.open(provider.key, context=context)
        except CannotOpenError as error:
            facts = {"provider": provider.name, "reason": str(error)}
            _log.error("a provider's key cannot be opened", extra={"facts": facts})
            detail = f"its key cannot be opened: {error}"
            dead = Fault(kind="error", refusal=AWAY, detail=detail, ours=True, key_dead=True)
            raise FaultError(dead) from error
        self._keys[provider.name] = (provider.version, key)
        return key

    def _is_dead(self, name: str) -> bool:
        guard = self._guards.get(name)
        return guard is not None and guard.key_dead


async def whole_body(call: Call, first: bytes = b"") -> bytes:
    """All that is left of an answer. Raises FaultError, also for one that is too long."""

    async def pieces() -> AsyncIterator[bytes]:
        if first:
            yield first
        while piece := await call.read():
            yield piece

    body = await _bounded(pieces(), ANSWER_BYTES_MAX + 1)
    if len(body) > ANSWER_BYTES_MAX:
        raise broken(f"its answer is over {ANSWER_BYTES_MAX} bytes")
    return body


async def _bounded(pieces: AsyncIterator[bytes], bytes_max: int) -> bytes:
    """The first `bytes_max` bytes."""
    body = bytearray()
    async for piece in pieces:
        body += piece[: bytes_max - len(body)]
        if len(body) >= bytes_max:
            break
    return bytes(body)
