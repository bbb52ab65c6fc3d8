"""What the dispatcher holds right now, read from Valkey and checked against itself.

Reads only, but for one thing: tickets of gateways long silent are let go first, as the next
call to their pool would. At idle every sum is zero.
"""

import asyncio
from collections import Counter
from typing import Any, cast

import msgspec

from core.dispatch import PoolRules
from core.limits import LimitRules
from store.keys import POOL_LAYOUT, POOL_PARTS, TENANT_PARTS, pool_keys, tenant_keys
from store.redis_client import RedisAwayError, RedisClient
from store.scripts import Function, dispatch_functions

SWEEPS_MAX = 1_000  # calls, for each pool
SCAN_COUNT = 1_000

_decode = msgspec.msgpack.Decoder().decode


class ReplicaAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What open tickets hold of one replica."""

    replica: str
    boot_id: str
    tickets: int
    kv_blocks: int
    unreported_blocks: int


class PoolAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One pool: how many tickets are in each state, and what they hold."""

    pool: str
    epoch: str
    gateways: tuple[str, ...]
    queued: int
    granted: int
    placed: int
    dropped: int
    replicas: tuple[ReplicaAccount, ...]


class TenantAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant with tickets held."""

    tenant: str
    held: tuple[str, ...]


class DispatchAudit(msgspec.Struct, frozen=True, kw_only=True):
    """`problems` are contradictions, which load never explains."""

    pools: tuple[PoolAudit, ...]
    tenants: tuple[TenantAudit, ...]
    problems: tuple[str, ...]

    @property
    def tickets(self) -> int:
        """In pools, whatever their state, and held by tenants."""
        in_pools = sum(p.queued + p.granted + p.placed + p.dropped for p in self.pools)
        return in_pools + sum(len(tenant.held) for tenant in self.tenants)

    @property
    def kv_blocks(self) -> int:
        """On all replicas' accounts."""
        return sum(account.kv_blocks for pool in self.pools for account in pool.replicas)

    @property
    def is_idle(self) -> bool:
        """Nothing held and nothing wrong."""
        return self.tickets == 0 and self.kv_blocks == 0 and not self.problems


async def audit(redis_url: str, *, timeout_ms: int = 1_000) -> DispatchAudit:
    """Raises RedisAwayError when Valkey cannot be reached."""
    client = RedisClient(redis_url, timeout_ms=timeout_ms)
    client.start()
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await client.connected.wait()
        return await _audit(client)
    except TimeoutError as error:
        raise RedisAwayError("not connected") from error
    finally:
        await client.close()


async def _audit(client: RedisClient) -> DispatchAudit:
    sweep = dispatch_functions(PoolRules(), LimitRules()).cancel_pool
    pools, problems = [], []
    for pool in await _names(client, "p", f"{POOL_LAYOUT}:{POOL_PARTS[0]}"):
        await _sweep(client, sweep, pool)
        found, wrong = _examine(pool, await _read_pool(client, pool))
        pools.append(found)
        problems += wrong
    tenants = []
    for tenant in await _names(client, "t", TENANT_PARTS[1]):
        held = await _held(client, tenant)
        problems += _miscounted(tenant, *await _read_tenant(client, tenant))
        if held:
            tenants.append(TenantAudit(tenant=tenant, held=held))
    return DispatchAudit(pools=tuple(pools), tenants=tuple(tenants), problems=tuple(problems))


async def _names(client: RedisClient, tag: str, part: str) -> list[str]:
    """Every pool or tenant that has this key."""
    begin, end = f"{{{tag}:", f"}}:{part}"
    cursor, names = b"0", set()
    while True:
        reply = await client.call(b"SCAN", cursor, b"MATCH", f"{begin}*{end}", b"COUNT", SCAN_COUNT)
        cursor, keys = cast("tuple[bytes, list[bytes]]", reply)
        names |= {key.decode()[len(begin) : -len(end)] for key in keys}
        if cursor == b"0":
            return sorted(names)


async def _sweep(client: RedisClient, function: Function, pool: str) -> None:
    """A cancel of nothing lets go of what silent gateways left, a few tickets at a time."""
    keys = pool_keys(pool)
    owned, gateways = keys[POOL_PARTS.index("owned")], keys[POOL_PARTS.index("gateways")]
    before: tuple[object, object] | None = None
    for _ in range(SWEEPS_MAX):
        await client.run(function, keys, "", pool, "audit", "")
        left = (await client.call(b"ZCARD", owned), await client.call(b"ZCARD", gateways))
        if left == before:
            return
        before = left


async def _held(client: RedisClient, tenant: str) -> tuple[str, ...]:
    seconds, micros = cast("list[bytes]", await client.call(b"TIME"))
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    key = tenant_keys(tenant)[TENANT_PARTS.index("held")]
    names = cast("list[bytes]", await client.call(b"ZRANGE", key, f"({now_ms}", "+inf", "BYSCORE"))
    return tuple(name.decode() for name in names)


async def _read_tenant(client: RedisClient, tenant: str) -> tuple[dict[str, int], list[str]]:
    """What each scope counts, and the scopes of every ticket, lapsed ones included."""
    key = dict(zip(TENANT_PARTS, tenant_keys(tenant), strict=True))
    client.call(b"MULTI")
    client.call(b"HGETALL", key["scopes"])
    client.call(b"HVALS", key["tickets"])
    states, tickets = cast("tuple[dict[bytes, bytes], list[bytes]]", await client.call(b"EXEC"))
    states.pop(b"now", None)
    counts = {name.decode(): _decode(packed)[-1] for name, packed in states.items()}
    return counts, [name for packed in tickets for name in _decode(packed)[-1][::4]]


def _miscounted(tenant: str, counts: dict[str, int], named: list[str]) -> list[str]:
    """A scope counts exactly the tickets that name it; one that holds nothing may be forgotten."""
    # Long after the last call, what is left of a silent gateway's tickets outlives all scopes.
    tickets = Counter(named if counts else ())
    return [
        f"tenant {tenant}: {name} counts {counts.get(name, 0)}, its tickets are {tickets[name]}"
        for name in sorted({*counts, *tickets})
        if counts.get(name, 0) != tickets[name]
    ]


async def _read_pool(client: RedisClient, pool: str) -> dict[str, Any]:
    key = dict(zip(POOL_PARTS, pool_keys(pool), strict=True))
    # One transaction, so that the parts are of one moment.
    client.call(b"MULTI")
    for name in ("state", "replicas", "tickets", "gateways", "unreported", "fifo"):
        match name:
            case "state":
                client.call(b"GET", key[name])
            case "replicas" | "tickets":
                client.call(b"HVALS", key[name])
            case _:
                client.call(b"ZRANGE", key[name], 0, -1)
    state, replicas, tickets, gateways, unreported, fifo = cast(
        "list[Any]", await client.call(b"EXEC")
    )
    return {
        "state": _decode(state) if state else {"epoch": ""},
        "replicas": [_decode(packed) for packed in replicas],
        "tickets": [_decode(packed) for packed in tickets],
        "gateways": [name.decode() for name in gateways],
        "unreported": [member.decode().split("|", 3) for member in unreported],
        "waiting": len(fifo),
    }


def _examine(pool: str, read: dict[str, Any]) -> tuple[PoolAudit, list[str]]:
    states = [ticket["state"] for ticket in read["tickets"]]
    accounts = tuple(
        ReplicaAccount(
            replica=replica["replica"],
            boot_id=replica["boot_id"],
            tickets=replica["open"],
            kv_blocks=replica["open_blocks"],
            unreported_blocks=replica["unreported_blocks"],
        )
        for replica in read["replicas"]
    )
    problems = [
        problem
        for replica in read["replicas"]
        for problem in _contradictions(replica, read["tickets"], read["unreported"])
    ]
    if read["waiting"] != states.count("queued"):
        problems.append(f"{read['waiting']} in the queue, {states.count('queued')} tickets queued")
    found = PoolAudit(
        pool=pool,
        epoch=read["state"]["epoch"],
        gateways=tuple(read["gateways"]),
        queued=states.count("queued"),
        granted=states.count("granted"),
        placed=states.count("placed"),
        dropped=states.count("dropped"),
        replicas=accounts,
    )
    return found, [f"pool {pool}: {problem}" for problem in problems]


def _contradictions(
    replica: dict[str, Any], tickets: list[dict[str, Any]], unreported: list[list[str]]
) -> list[str]:
    """Where an account is not the sum of what is open on the replica."""
    number = replica["number"]
    open_tickets = [ticket for ticket in tickets if ticket["number"] == number]
    sums = {
        "open": len(open_tickets),
        "open_blocks": sum(ticket["kv_blocks"] for ticket in open_tickets),
        "unreported_blocks": sum(int(part[2]) for part in unreported if int(part[0]) == number),
    }
    return [
        f"replica {replica['replica']} has {name} {replica[name]}, its tickets sum to {total}"
        for name, total in sums.items()
        if replica[name] != total
    ]
