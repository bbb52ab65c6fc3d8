"""Scaling policies, what a scaler remembers and decided, and the facts it decides from.

What policies, states and decisions hold is the control plane's; here they are JSON. Times are
the database's clock, so that any control plane goes on where another left off.
"""

from typing import Any

import msgspec
from psycopg.types.json import Jsonb

from core.ids import REQUEST_ENTROPY_BYTES, request_id
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

FROM_NEWEST = 2**63 - 1
LONG_MS = 600_000  # a request's length at most, as far as its tokens are looked for

_sql = load("scaling")
_requests = load("usage")


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy as written. `version` rises with each change."""

    target: str
    body: dict[str, Any]
    version: int
    updated_ms: int


class Governed(msgspec.Struct, frozen=True, kw_only=True):
    """A running deployment and the policy that governs it, where that was asked for.

    `sharing` is how many deployments serve the same version in the same region: requests do not
    say to which of them they went.
    """

    deployment: str
    version: str
    region: str
    replicas_desired: int | None
    replicas_warm: int
    body: dict[str, Any] | None
    state: dict[str, Any] | None
    sharing: int


class ReplicaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, or one that was asked for and has not been heard of: then most is None."""

    replica: str
    state: str
    coming_ms: int
    silent_ms: int | None
    kv_blocks: int | None
    kv_blocks_free: int | None
    running: int | None
    sequences: int | None


class ColdStarts(msgspec.Struct, frozen=True, kw_only=True):
    """How long starts took, and how long ago the last one was; None where there was none."""

    took_ms: int | None
    age_ms: int | None


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one version in one region: `arrived` and `served` in the window, the rest long."""

    arrived: int
    arrived_prompt: int
    ended: int
    prompt: int
    uncached: int
    output: int
    served_uncached: int
    served_output: int
    ttft_ms: float | None


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A scaler's last word, and when one was last put among the decisions."""

    decision: dict[str, Any]
    told_ms_ago: int


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that changed something, or the word of every few minutes."""

    id: int
    deployment: str
    at_ms: int
    before: int | None
    desired: int
    wake: int
    start: int
    stop: int
    reasons: list[str]
    alarms: list[str]


async def lock_policies(conn: Connection) -> None:
    """Until the transaction ends, nobody else writes a policy."""
    await conn.execute(_sql["lock_policies"])


async def put_policy(
    conn: Connection, *, target: str, deployment: str, model: str, body: dict[str, Any]
) -> int:
    """Its version. `model` is the target's own or its deployment's."""
    values = {
        "target": target,
        "deployment": deployment or None,
        "model": model,
        "body": Jsonb(body),
    }
    row = await (await conn.execute(_sql["put_scaling_policy"], values)).fetchone()
    assert row is not None, "an upsert returns its row"
    return int(row[0])


async def delete_policy(conn: Connection, target: str) -> bool:
    """Whether there was one."""
    row = await (await conn.execute(_sql["delete_scaling_policy"], {"target": target})).fetchone()
    return row is not None


async def policy(conn: Connection, target: str) -> PolicyRow | None:
    """By its target."""
    async with conn.cursor(row_factory=struct_row(PolicyRow)) as cursor:
        await cursor.execute(_sql["scaling_policy"], {"target": target})
        return await cursor.fetchone()


async def policies_page(conn: Connection, *, after: str = "", limit: int) -> list[PolicyRow]:
    """In order of target, after `after`."""
    async with conn.cursor(row_factory=struct_row(PolicyRow)) as cursor:
        await cursor.execute(_sql["scaling_policies_page"], {"after": after, "limit": limit})
        return await cursor.fetchall()


async def policies_of_model(conn: Connection, model: str) -> list[PolicyRow]:
    """Of the model, and of its deployments."""
    async with conn.cursor(row_factory=struct_row(PolicyRow)) as cursor:
        await cursor.execute(_sql["scaling_policies_of_model"], {"model": model})
        return await cursor.fetchall()


async def governed(conn: Connection, *, after: str = "", limit: int) -> list[Governed]:
    """Running deployments with a policy, in order of name."""
    async with conn.cursor(row_factory=struct_row(Governed)) as cursor:
        await cursor.execute(_sql["governed"], {"after": after, "limit": limit})
        return await cursor.fetchall()


async def is_as_read(conn: Connection, read: Governed) -> bool:
    """Whether its policy and its count still are, and stay so until the transaction ends."""
    values = {"deployment": read.deployment}
    row = await (await conn.execute(_sql["hold_governed"], values)).fetchone()
    return row == (read.replicas_desired, read.replicas_warm, read.body)


async def governing(conn: Connection, deployment: str) -> str | None:
    """The target of the policy that governs it."""
    row = await (await conn.execute(_sql["governing"], {"deployment": deployment})).fetchone()
    return None if row is None else str(row[0])


async def governable(
    conn: Connection, *, model: str, deployment: str = "", limit: int
) -> list[Governed]:
    """Running deployments that a policy for the model, or for one of them, would govern."""
    async with conn.cursor(row_factory=struct_row(Governed)) as cursor:
        values = {"model": model, "deployment": deployment, "limit": limit}
        await cursor.execute(_sql["governable"], values)
        return await cursor.fetchall()


async def now_ms(conn: Connection) -> int:
    """The server's clock, in Unix milliseconds."""
    row = await (await conn.execute(_sql["scaling_now"])).fetchone()
    assert row is not None, "a clock always answers"
    return int(row[0])


async def replicas(conn: Connection, deployment: str) -> list[ReplicaFacts]:
    """Those that are there or were asked for, in order of id."""
    async with conn.cursor(row_factory=struct_row(ReplicaFacts)) as cursor:
        await cursor.execute(_sql["scaling_replicas"], {"deployment": deployment})
        return await cursor.fetchall()


async def cold_starts(conn: Connection, version: str) -> ColdStarts:
    """As measured from replicas' own history."""
    async with conn.cursor(row_factory=struct_row(ColdStarts)) as cursor:
        await cursor.execute(_sql["cold_starts"], {"version": version})
        found = await cursor.fetchone()
    assert found is not None, "an aggregate has a row"
    return found


async def traffic(
    conn: Connection, *, version: str, region: str, at_ms: int, window_ms: int
) -> Traffic:
    """What came and what was served until `at_ms`. For use within a transaction."""
    since_ms, long_ms = at_ms - window_ms, at_ms - LONG_MS - window_ms
    values = {
        "version": version,
        "region": region,
        "since_ms": since_ms,
        "long_ms": long_ms,
        "first_id": _first_id(region, long_ms),
        "window_id": _first_id(region, since_ms),
        "last_id": f"req_{region}_g",  # beyond every hex digit
    }
    await conn.execute(_requests["plan_for_each"])
    async with conn.cursor(row_factory=struct_row(Traffic)) as cursor:
        await cursor.execute(_sql["traffic"], values)
        found = await cursor.fetchone()
    assert found is not None, "an aggregate has a row"
    return found


async def said(conn: Connection, deployment: str) -> Said | None:
    """The last word, locked until the transaction ends; None before the first."""
    async with conn.cursor(row_factory=struct_row(Said)) as cursor:
        await cursor.execute(_sql["scaling_said"], {"deployment": deployment})
        return await cursor.fetchone()


async def keep_state(
    conn: Connection,
    deployment: str,
    *,
    state: dict[str, Any],
    decision: dict[str, Any],
    told: bool,
) -> None:
    """What the next round goes on from; `told` when it is among the decisions too."""
    values = {
        "deployment": deployment,
        "state": Jsonb(state),
        "decision": Jsonb(decision),
        "told": told,
    }
    await conn.execute(_sql["keep_scaling_state"], values)


async def tell_decision(conn: Connection, deployment: str, decision: dict[str, Any]) -> None:
    """Append it. The fields of `DecisionRow`, but for `id` and `at_ms`."""
    values = {
        **decision,
        "deployment": deployment,
        "reasons": Jsonb(decision["reasons"]),
        "alarms": Jsonb(decision["alarms"]),
    }
    await conn.execute(_sql["tell_scaling_decision"], values)


async def decisions_page(
    conn: Connection, *, deployment: str = "", before: int = FROM_NEWEST, limit: int
) -> list[DecisionRow]:
    """Newest first."""
    async with conn.cursor(row_factory=struct_row(DecisionRow)) as cursor:
        values = {"deployment": deployment, "before": before, "limit": limit}
        await cursor.execute(_sql["scaling_decisions_page"], values)
        return await cursor.fetchall()


async def forget_decisions(conn: Connection, *, kept_ms: int, limit: int) -> None:
    """Drop what is older, of all deployments."""
    await conn.execute(_sql["forget_scaling_decisions"], {"kept_ms": kept_ms, "limit": limit})


async def cut_decisions(conn: Connection, deployment: str, *, kept_max: int, limit: int) -> None:
    """Drop the oldest of one deployment beyond so many."""
    values = {"deployment": deployment, "kept_max": kept_max, "limit": limit}
    await conn.execute(_sql["cut_scaling_decisions"], values)


def _first_id(region: str, at_ms: int) -> str:
    return request_id(region, bytes(REQUEST_ENTROPY_BYTES), max(0, at_ms))
