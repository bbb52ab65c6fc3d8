"""The dispatcher in Valkey, shared by every gateway: each call is one function, run atomically.

Only encoding and decoding: the rules are in `store/lua`, and in the pure twins in `core`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar, cast

import msgspec

from core.tickets import (
    Admit,
    Admitted,
    Arm,
    Dropped,
    Grant,
    Headroom,
    LimitRefused,
    Output,
    Placed,
    Queued,
    Remaining,
    Renew,
    Renewed,
    Scope,
    Seen,
    Stale,
    tightest_rooms,
)
from store.dispatch_backend import ArmReply, PoolReply
from store.keys import ROUTE_VERSIONS, pool_keys, tenant_keys
from store.redis_client import RedisClient
from store.scripts import DispatchFunctions, Function

T = TypeVar("T")

KEYS_CACHED_MAX = 10_000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class RemoteDispatch:
    """A `Backend`. `limits_now` is when tenants' limits are judged: "" by the server's clock."""

    def __init__(self, client: RedisClient, functions: DispatchFunctions) -> None:
        self._client = client
        self._functions = functions
        self.limits_now = ""  # ms; tests stop time with it
        self._tenant_keys: dict[str, tuple[bytes, ...]] = {}
        self._pool_keys: dict[str, tuple[bytes, ...]] = {}

    def admit(self, asked: Admit) -> Awaitable[Admitted | LimitRefused | Stale]:
        """Asks for the route's version beside the function: it lives in another slot."""
        route = self._client.call(b"HGET", ROUTE_VERSIONS, asked.model)
        versions = asked.versions
        scopes = [part for scope in asked.all_scopes for part in _scope_parts(scope)]
        answer = self._client.run(
            self._functions.admit,
            self._tenant(asked.tenant),
            self.limits_now,
            asked.ticket,
            asked.key,
            versions.key,
            versions.tenant,
            asked.input_tokens,
            asked.output_tokens,
            *scopes,
        )
        return self._judge(asked, route, answer)

    def look(self, tenant: str, scopes: tuple[Scope, ...]) -> Awaitable[tuple[Seen, ...]]:
        """See `Backend`."""
        parts = [part for scope in scopes for part in _scope_parts(scope)]
        keys = self._tenant(tenant)[:-1]
        return _Answer(
            self._client.run(self._functions.look, keys, self.limits_now, *parts), _read_seen
        )

    def charge(self, tenant: str, outputs: tuple[Output, ...]) -> Awaitable[None]:
        """See `Backend`."""
        parts: list[str | int | bytes] = []
        for ticket, total, scopes in outputs:
            parts += (ticket, total, _encode(scopes))
        return self._run_tenant(self._functions.charge, tenant, *parts)

    def finish_tenant(
        self, tenant: str, ticket: str, *, input_tokens: int, output_total: int
    ) -> Awaitable[None]:
        """See `Backend`."""
        function = self._functions.finish_tenant
        return self._run_tenant(function, tenant, ticket, input_tokens, output_total)

    def cancel_tenant(self, tenant: str, ticket: str) -> Awaitable[None]:
        """See `Backend`."""
        return self._run_tenant(self._functions.cancel_tenant, tenant, ticket)

    def arm(self, arm: Arm) -> Awaitable[ArmReply]:
        """See `Backend`."""
        answer = self._client.run(
            self._functions.arm, self._pool(arm.pool), "", arm.pool, arm.gateway, _encode(arm)
        )
        return _Answer(answer, _read_arm)

    def renew(self, renew: Renew) -> Awaitable[Renewed]:
        """See `Backend`."""
        answer = self._client.run(self._functions.renew, self._pool(renew.pool), "", _encode(renew))
        return _Answer(answer, _read_renewed)

    def finish_pool(
        self,
        pool: str,
        gateway: str,
        ticket: str,
        *,
        input_tokens: int,
        output_tokens: int,
        prefix_hashes: tuple[str, ...],
    ) -> Awaitable[PoolReply]:
        """See `Backend`."""
        answer = self._client.run(
            self._functions.finish_pool,
            self._pool(pool),
            "",
            pool,
            gateway,
            ticket,
            input_tokens,
            output_tokens,
            _encode(prefix_hashes),
        )
        return _Answer(answer, _read_pool)

    def cancel_pool(self, pool: str, gateway: str, ticket: str) -> Awaitable[PoolReply]:
        """See `Backend`."""
        answer = self._client.run(
            self._functions.cancel_pool, self._pool(pool), "", pool, gateway, ticket
        )
        return _Answer(answer, _read_pool)

    async def _judge(
        self, asked: Admit, route: "asyncio.Future[object]", answer: "asyncio.Future[object]"
    ) -> Admitted | LimitRefused | Stale:
        known = await route
        admitted = _read_admit(await answer)
        is_stale = known is not None and asked.versions.route < int(cast("bytes", known))
        if not is_stale:
            return admitted
        if isinstance(admitted, Stale):
            return msgspec.structs.replace(admitted, route=True)
        if isinstance(admitted, Admitted):
            await self.cancel_tenant(asked.tenant, asked.ticket)
        return Stale(route=True)

    def _run_tenant(
        self, function: Function, tenant: str, *args: str | int | bytes
    ) -> Awaitable[None]:
        # The versions are `admit`'s alone.
        keys = self._tenant(tenant)[:-1]
        return _Answer(self._client.run(function, keys, self.limits_now, *args), _nothing)

    def _tenant(self, tenant: str) -> tuple[bytes, ...]:
        return _cached(self._tenant_keys, tenant, tenant_keys)

    def _pool(self, pool: str) -> tuple[bytes, ...]:
        return _cached(self._pool_keys, pool, pool_keys)


class _Answer(Generic[T]):
    """An answer under way, and how to read it."""

    def __init__(self, future: "asyncio.Future[object]", read: Callable[[Any], T]) -> None:
        self._future = future
        self._read = read

    def __await__(self) -> Generator[Any, None, T]:
        """Raises RedisAwayError or RedisReplyError."""
        reply = yield from self._future.__await__()
        return self._read(reply)


def _cached(
    known: dict[str, tuple[bytes, ...]], name: str, make: Callable[[str], tuple[bytes, ...]]
) -> tuple[bytes, ...]:
    keys = known.get(name)
    if keys is None:
        if len(known) >= KEYS_CACHED_MAX:
            known.clear()
        keys = known[name] = make(name)
    return keys


def _nothing(_: Any) -> None:
    return None


def _read_admit(reply: Any) -> Admitted | LimitRefused | Stale:
    status, *told = _decode(reply)
    if status == "stale":
        return Stale(key=told[0], tenant=told[1])
    scope, reason, retry_after_ms, *numbers = told
    rooms = tuple(_room(numbers[i : i + 9]) for i in range(0, len(numbers), 9))
    headroom = tightest_rooms(rooms)
    if status == "admitted":
        return Admitted(headroom=headroom, rooms=rooms)
    return LimitRefused(
        reason=reason, scope=scope, retry_after_ms=retry_after_ms, headroom=headroom, rooms=rooms
    )


def _read_seen(reply: Any) -> tuple[Seen, ...]:
    numbers = _decode(reply)
    return tuple(
        Seen(room=_room(numbers[i : i + 9]), held=numbers[i + 9])
        for i in range(0, len(numbers), 10)
    )


def _scope_parts(scope: Scope) -> tuple[str | int, ...]:
    limits = scope.limits
    return (
        scope.name,
        limits.requests_per_min,
        limits.input_tokens_per_min,
        limits.output_tokens_per_min,
        limits.concurrency,
    )


def _room(numbers: list[int]) -> Headroom:
    return Headroom(
        requests=_remaining(numbers[0:3]),
        input_tokens=_remaining(numbers[3:6]),
        output_tokens=_remaining(numbers[6:9]),
    )


def _remaining(numbers: list[int]) -> Remaining:
    return Remaining(limit=numbers[0], remaining=numbers[1], reset_ms=numbers[2])


def _read_arm(reply: Any) -> ArmReply:
    epoch, outcome, grants = _decode(reply)
    return ArmReply(_read_outcome(outcome), PoolReply(epoch, _read_grants(grants)))


def _read_pool(reply: Any) -> PoolReply:
    epoch, grants = _decode(reply)
    return PoolReply(epoch, _read_grants(grants))


def _read_renewed(reply: Any) -> Renewed:
    epoch, grants, reannounce, confirmed, congestion_ms = _decode(reply)
    return Renewed(
        epoch=epoch,
        grants=_read_grants(grants),
        reannounce=reannounce,
        confirmed=_read_grants(confirmed),
        congestion_ms=congestion_ms,
    )


def _read_grants(grants: Any) -> tuple[Grant, ...]:
    return tuple(_read_grant(ticket, outcome) for ticket, outcome in grants)


def _read_grant(ticket: str, outcome: Any) -> Grant:
    read = _read_outcome(outcome)
    assert not isinstance(read, Queued), "a grant is an outcome"
    return Grant(ticket=ticket, outcome=read)


def _read_outcome(outcome: Any) -> Placed | Queued | Dropped:
    match outcome:
        case ["placed", replica, boot_id, url, placement, matched]:
            return Placed(
                replica=replica,
                boot_id=boot_id,
                url=url,
                placement=placement,
                prefix_matched=matched,
            )
        case ["queued", position, expected_wait_ms]:
            return Queued(position=position, expected_wait_ms=expected_wait_ms)
        case ["dropped", reason, expected_wait_ms]:
            return Dropped(reason=reason, expected_wait_ms=expected_wait_ms)
        case _:
            raise AssertionError(f"a function answered {outcome!r}")
