"""One tenant's limits twice, as a pure state machine and as functions on a server, told the same.

`TwinTenant` runs each command on both, and compares every answer and the whole state after it.
"""

from typing import Any

import msgspec
import redis

from core.dispatch import PoolRules
from core.limits import Buckets, LimitRules, admit, cancel, charge, check_versions, finish, look
from core.tickets import Admit, Admitted, Headroom, Output, Scope, Stale
from store.keys import tenant_keys
from tests.support.dispatch_worlds import functions_for, run


class TwinTenant:
    """One tenant's limits."""

    def __init__(self, client: redis.Redis, rules: LimitRules, tenant: str = "ten") -> None:
        self.client, self.rules = client, rules
        self.keys = tenant_keys(tenant)
        self.functions = functions_for(PoolRules(), rules)
        self.pure = Buckets()
        self.versions: dict[str, int] = {}
        client.flushall()

    def push(self, field: str, version: int) -> None:
        self.versions[field] = version
        self.client.hset(self.keys[-1], field, version)

    def admit(self, asked: Admit, now_ms: int) -> Any:
        expected: Any = check_versions(self.versions, asked)
        if expected is None:
            expected = admit(self.pure, asked, now_ms, self.rules)
        scopes = [
            part
            for scope in asked.all_scopes
            for part in (scope.name, *msgspec.structs.astuple(scope.limits))
        ]
        reply = run(
            self.client,
            self.functions.admit,
            self.keys,
            now_ms,
            asked.ticket,
            asked.key,
            asked.versions.key,
            asked.versions.tenant,
            asked.input_tokens,
            asked.output_tokens,
            *scopes,
        )
        assert msgspec.msgpack.decode(reply) == self._flat(expected)
        if not isinstance(expected, Stale):
            self._compare()
        return expected

    def look(self, scopes: tuple[Scope, ...], now_ms: int) -> None:
        before = self._dumped()
        expected = look(self.pure, scopes, now_ms, self.rules)
        asked = [
            part
            for scope in scopes
            for part in (scope.name, *msgspec.structs.astuple(scope.limits))
        ]
        reply = run(self.client, self.functions.look, self.keys[:-1], now_ms, *asked)
        assert msgspec.msgpack.decode(reply) == [
            number for seen in expected for number in (*self._room(seen.room), seen.held)
        ]
        assert self._dumped() == before, "looking changes nothing"

    def charge(self, outputs: tuple[Output, ...], now_ms: int) -> None:
        charge(self.pure, outputs, now_ms, self.rules)
        flat = [
            part
            for ticket, total, scopes in outputs
            for part in (ticket, total, msgspec.msgpack.encode(scopes))
        ]
        run(self.client, self.functions.charge, self.keys[:-1], now_ms, *flat)
        self._compare()

    def finish(self, ticket: str, input_tokens: int, output_total: int, now_ms: int) -> None:
        finish(
            self.pure,
            ticket,
            input_tokens=input_tokens,
            output_total=output_total,
            now_ms=now_ms,
            rules=self.rules,
        )
        run(
            self.client,
            self.functions.finish_tenant,
            self.keys[:-1],
            now_ms,
            ticket,
            input_tokens,
            output_total,
        )
        self._compare()

    def cancel(self, ticket: str, now_ms: int) -> None:
        cancel(self.pure, ticket, now_ms, self.rules)
        run(self.client, self.functions.cancel_tenant, self.keys[:-1], now_ms, ticket)
        self._compare()

    def _flat(self, answer: Any) -> list[Any]:
        if isinstance(answer, Stale):
            return ["stale", answer.key, answer.tenant]
        numbers = [number for room in answer.rooms for number in self._room(room)]
        if isinstance(answer, Admitted):
            return ["admitted", "", "", 0, *numbers]
        return ["refused", answer.scope, answer.reason, answer.retry_after_ms, *numbers]

    def _room(self, room: Headroom) -> list[int]:
        parts = (room.requests, room.input_tokens, room.output_tokens)
        return [n for part in parts for n in (part.limit, part.remaining, part.reset_ms)]

    def _dumped(self) -> list[Any]:
        kept = [self.client.dump(key) for key in self.keys]
        return [*kept, msgspec.to_builtins(self.pure)]

    def _compare(self) -> None:
        pure = self.pure
        stored = {
            name.decode(): packed for name, packed in self.client.hgetall(self.keys[0]).items()
        }
        assert int(stored.pop("now")) == pure.now_ms
        assert {name: msgspec.msgpack.decode(packed) for name, packed in stored.items()} == {
            name: [
                bucket.at_ms,
                bucket.concurrency,
                *bucket.per_min,
                *(False if level is None else level for level in bucket.levels),
                bucket.held,
            ]
            for name, bucket in pure.scopes.items()
        }
        idle = self.client.zrange(self.keys[3], 0, -1, withscores=True)
        assert {name.decode(): int(score) for name, score in idle} == {
            name: bucket.idle_ms for name, bucket in pure.scopes.items()
        }
        held = {
            name.decode(): int(score)
            for name, score in self.client.zrange(self.keys[1], 0, -1, withscores=True)
        }
        assert held == {name: one.expires_ms for name, one in pure.held.items()}
        for name, one in pure.held.items():
            stored = msgspec.msgpack.decode(self.client.hget(self.keys[2], name))
            assert stored == [
                one.charged,
                one.output_from,
                one.output_total,
                [part for name, units in one.scopes.items() for part in (name, *units)],
            ]
