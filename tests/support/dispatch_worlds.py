"""The dispatcher twice, as pure state machines and as functions on a server, told the same.

`TwinPool` runs each command on both, and compares every answer and the whole state after it.
"""

from typing import Any

import msgspec
import redis

from core.dispatch import Pool, PoolRules
from core.fair_queue import CLASSES
from core.limits import LimitRules
from core.tickets import (
    Admit,
    Arm,
    CacheVersions,
    Dropped,
    Grant,
    Limits,
    Placed,
    Queued,
    Renew,
)
from store.keys import POOL_PARTS, pool_keys
from store.scripts import Function, dispatch_functions

FUNCTIONS_CACHE: dict[tuple[PoolRules, LimitRules], Any] = {}


def functions_for(pool: PoolRules, limits: LimitRules) -> Any:
    key = (pool, limits)
    if key not in FUNCTIONS_CACHE:
        FUNCTIONS_CACHE[key] = dispatch_functions(pool, limits)
    return FUNCTIONS_CACHE[key]


def run(client: redis.Redis, function: Function, keys: tuple[bytes, ...], *args: Any) -> Any:
    try:
        return client.fcall(function.name.decode(), len(keys), *keys, *args)
    except redis.exceptions.ResponseError as error:
        if str(error) != "Function not found":
            raise
        client.function_load(function.library.text, replace=True)
        return client.fcall(function.name.decode(), len(keys), *keys, *args)


class TwinPool:
    """One pool."""

    def __init__(self, client: redis.Redis, rules: PoolRules, pool: str = "pool@local") -> None:
        self.client, self.rules, self.pool = client, rules, pool
        self.keys = pool_keys(pool)
        self.functions = functions_for(rules, LimitRules())
        self.pure = Pool(rules)
        client.flushall()

    def arm(self, arm: Arm, now_ms: int) -> Placed | Queued | Dropped:
        expected = self.pure.arm(arm, now_ms)
        epoch, outcome, grants = self._run(
            self.functions.arm, now_ms, self.pool, arm.gateway, msgspec.msgpack.encode(arm)
        )
        assert outcome == flat(expected)
        self._compare(epoch, grants, arm.gateway)
        return expected

    def renew(self, renew: Renew, now_ms: int) -> Any:
        expected = self.pure.renew(renew, now_ms)
        epoch, grants, reannounce, confirmed, congestion_ms = self._run(
            self.functions.renew, now_ms, msgspec.msgpack.encode(renew)
        )
        assert reannounce == expected.reannounce
        assert congestion_ms == expected.congestion_ms
        assert confirmed == flat_grants(expected.confirmed)
        assert grants == flat_grants(expected.grants)
        self._compare(epoch, grants, renew.gateway)
        return expected

    def finish(
        self,
        gateway: str,
        ticket: str,
        *,
        input_tokens: int,
        output_tokens: int,
        prefix_hashes: tuple[str, ...],
        now_ms: int,
    ) -> None:
        self.pure.finish(
            ticket,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            prefix_hashes=prefix_hashes,
            now_ms=now_ms,
        )
        epoch, grants = self._run(
            self.functions.finish_pool,
            now_ms,
            self.pool,
            gateway,
            ticket,
            input_tokens,
            output_tokens,
            msgspec.msgpack.encode(prefix_hashes),
        )
        self._compare(epoch, grants, gateway)

    def cancel(self, gateway: str, ticket: str, now_ms: int) -> None:
        self.pure.cancel(ticket, now_ms)
        epoch, grants = self._run(self.functions.cancel_pool, now_ms, self.pool, gateway, ticket)
        self._compare(epoch, grants, gateway)

    def lose_memory(self) -> None:
        self.client.flushall()
        self.pure = Pool(self.rules)

    def _run(self, function: Function, now_ms: int | str, *args: Any) -> Any:
        return msgspec.msgpack.decode(run(self.client, function, self.keys, now_ms, *args))

    def _compare(self, epoch: str, grants: Any, gateway: str) -> None:
        assert epoch == self.pure.epoch
        assert grants == flat_grants(self.pure.grants_for(gateway))
        if epoch:
            assert stored_pool(self.client, self.keys) == pure_pool(self.pure)


def flat(outcome: Placed | Queued | Dropped) -> list[Any]:
    match outcome:
        case Placed():
            return [
                "placed",
                outcome.replica,
                outcome.boot_id,
                outcome.url,
                outcome.placement,
                outcome.prefix_matched,
            ]
        case Queued():
            return ["queued", outcome.position, outcome.expected_wait_ms]
        case Dropped():
            return ["dropped", outcome.reason, outcome.expected_wait_ms]


def flat_grants(grants: tuple[Grant, ...]) -> list[Any]:
    return [[grant.ticket, flat(grant.outcome)] for grant in grants]


def pure_pool(pool: Pool) -> dict[str, Any]:
    """The pure pool's whole state in comparable form."""
    queue = pool.queue
    return {
        "clock": [
            pool.epoch,
            pool.now_ms,
            pool.attendance.started_ms,
            pool.fleet.empty_since_ms,
            pool.fleet.numbered,
        ],
        "service": [pool.service.stay_us, pool.service.samples, *pool.service.stretch.values()],
        "sums": [pool.fleet.open, pool.fleet.ready, pool.fleet.largest, len(pool.replicas)],
        "rooms": list(pool.fleet.rooms),
        "lives": pool.fleet.numbers,
        "open": pool.open_by_tenant,
        "owing": sorted(pool.attendance.owing),
        "counts": queue.counts,
        "credits": queue.credits,
        "floors": queue.floors,
        "base": queue.base,
        "counters": list(queue.counters),
        "waiting": {name: list(ranking) for name, ranking in queue.waiting.items()},
        "lines": {"|".join(lane): list(tickets) for lane, tickets in sorted(queue.tickets.items())},
        "replicas": {
            name: msgspec.to_builtins(replica)
            | {"unreported": {t: [u.placement, u.blocks] for t, u in replica.unreported.items()}}
            for name, replica in pool.replicas.items()
        },
        "tickets": {
            name: [
                ticket.gateway,
                ticket.state,
                flat(ticket.outcome) if ticket.outcome else None,
                ticket.number,
                ticket.deadline_ms,
                ticket.input_tokens,
                ticket.output_tokens,
                ticket.cost,
                ticket.in_lane,
                ticket.queued_ms,
                ticket.promised_ms,
            ]
            for name, ticket in pool.tickets.items()
        },
        "owned": sorted(f"{g}|{t}" for g, names in pool.book.owned.items() for t in names),
        "granted": sorted(f"{g}|{t}" for g, names in pool.book.granted.items() for t in names),
        "gateways": list(pool.attendance.gateways),
        "unacked": list(pool.book.unacked),
        "prefixes": list(pool.prefixes.owners.items()),
    }


def stored_pool(client: redis.Redis, keys: tuple[bytes, ...]) -> dict[str, Any]:
    """The same of a pool in the server."""
    key = dict(zip(POOL_PARTS, keys, strict=True))
    state = msgspec.msgpack.decode(client.get(key["state"]))

    def by_class(numbers: list[int]) -> dict[str, int]:
        return dict(zip(CLASSES, numbers, strict=True))

    def ranking(name: str) -> list[tuple[int, str]]:
        return [(int(s), m.decode()) for m, s in client.zrange(key[name], 0, -1, withscores=True)]

    def members(name: str) -> list[str]:
        return [member.decode() for member in client.zrange(key[name], 0, -1)]

    unreported: dict[int, dict[str, list[int]]] = {}
    for member in members("unreported"):
        number, placement, blocks, ticket = member.split("|", 3)
        unreported.setdefault(int(number), {})[ticket] = [int(placement), int(blocks)]
    lines: dict[str, list[str]] = {}
    for member in members("fifo"):
        service_class, tenant, _, ticket = member.split("|", 3)
        lines.setdefault(f"{service_class}|{tenant}", []).append(ticket)
    replicas = {}
    for name, packed in client.hgetall(key["replicas"]).items():
        replica = msgspec.msgpack.decode(packed)
        del replica["ranked"]  # what it has in `rooms`
        replicas[name.decode()] = replica | {"unreported": unreported.pop(replica["number"], {})}
    assert not unreported, "unreported placements of no replica"
    assert [state["granted"], state["unacked"]] == [
        len(members("granted")),
        len(ranking("unacked")),
    ]
    owners = client.hgetall(key["prefixes"])
    return {
        "clock": [
            state[part] for part in ("epoch", "now_ms", "started_ms", "empty_since_ms", "numbers")
        ],
        "service": [state["stay_us"], state["samples"], *state["stretch"]],
        "sums": [state[part] for part in ("open", "ready", "largest", "replicas")],
        "rooms": ranking("rooms"),
        "lives": {int(n): name.decode() for n, name in client.hgetall(key["lives"]).items()},
        "open": {t.decode(): int(count) for t, count in client.hgetall(key["open"]).items()},
        "owing": sorted(state["owing"]),
        "counts": by_class(state["counts"]),
        "credits": by_class(state["credits"]),
        "floors": by_class(state["floors"]),
        "base": state["base"],
        "counters": ranking("counters"),
        "waiting": {name: ranking(name) for name in ("interactive", "standard", "batch")},
        "lines": dict(sorted(lines.items())),
        "replicas": replicas,
        "tickets": {
            name.decode(): stored_ticket(msgspec.msgpack.decode(packed))
            for name, packed in client.hgetall(key["tickets"]).items()
        },
        "owned": members("owned"),
        "granted": members("granted"),
        "gateways": ranking("gateways"),
        "unacked": ranking("unacked"),
        "prefixes": [
            (name, [int(number) for number in owners[name.encode()].split(b",")])
            for name in members("recency")
        ],
    }


def stored_ticket(ticket: dict[str, Any]) -> list[Any]:
    outcome: list[Any] | None = None
    if ticket["state"] == "dropped":
        outcome = ["dropped", ticket["reason"], ticket["wait_ms"]]
    elif ticket["state"] != "queued":
        placed = ticket["placed"]
        outcome = [
            "placed",
            placed["replica"],
            placed["boot_id"],
            placed["url"],
            placed["placement"],
            placed["prefix_matched"],
        ]
    return [
        ticket["gateway"],
        ticket["state"],
        outcome,
        ticket["number"],
        ticket["deadline_ms"],
        ticket["input_tokens"],
        ticket["output_tokens"],
        ticket["cost"],
        ticket["in_lane"],
        ticket["queued_ms"],
        ticket["promised_ms"],
    ]


def an_admit(ticket: str = "t1", **changes: Any) -> Admit:
    defaults: dict[str, Any] = {
        "ticket": ticket,
        "gateway": "gw",
        "tenant": "ten",
        "key": "key",
        "model": "model",
        "versions": CacheVersions(key=1, tenant=1, route=1),
        "limits": Limits(),
        "input_tokens": 10,
    }
    return Admit(**(defaults | changes))


def an_arm(ticket: str = "t1", **changes: Any) -> Arm:
    defaults: dict[str, Any] = {
        "ticket": ticket,
        "gateway": "gw",
        "pool": "pool@local",
        "tenant": "ten",
        "weight": 1,
        "service_class": "standard",
        "deadline_ms": 0,
        "kv_blocks": 1,
        "prompt_tokens": 10,
    }
    return Arm(**(defaults | changes))
