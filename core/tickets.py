"""What a gateway and the dispatcher say to each other about one request: its ticket.

    admit ──► Admitted | LimitRefused | Stale     tenant's limits are charged, ticket held
    arm   ──► Placed | Queued | Dropped           a replica, or a place in its class's queue
    renew ──► grants for queued tickets           every 500 ms, and what the gateway knows
    finish                                        the engine's last word: slots are free again
    cancel                                        idempotent: refunds everything charged

The ticket's name is the request id. The rules are in `core.limits` and `core.dispatch`; the
same rules run atomically as Lua in `store/lua`.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from core.protocol import Load, ServiceClass

PREFIX_HASHES_MAX = 64
TENANT_SCOPE = "tenant"  # that everything of a tenant's counts in


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scope's limits; 0 is unlimited. Per-minute ones are buckets that refill steadily."""

    requests_per_min: int = 0
    input_tokens_per_min: int = 0
    output_tokens_per_min: int = 0
    concurrency: int = 0


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tenant's traffic with limits of its own: `key:<id>`, `model:<name>`, or both.

    The name says which to dispatcher and gateway alike; `core.scopes` makes it and reads it.
    """

    name: str
    limits: Limits


class Remaining(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket's state for rate-limit headers: `limit` 0 is unlimited."""

    limit: int = 0
    remaining: int = 0
    reset_ms: int = 0  # until full again


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a scope's buckets, or the least that is left of several."""

    requests: Remaining = Remaining()
    input_tokens: Remaining = Remaining()
    output_tokens: Remaining = Remaining()


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A scope as somebody looks at it: what is left, and how many tickets count in it."""

    room: Headroom
    held: int


def tightest_rooms(rooms: tuple[Headroom, ...]) -> Headroom:
    """Of each bucket the one, among all scopes', that will refuse first."""
    if len(rooms) == 1:
        return rooms[0]
    return Headroom(
        requests=_least(room.requests for room in rooms),
        input_tokens=_least(room.input_tokens for room in rooms),
        output_tokens=_least(room.output_tokens for room in rooms),
    )


def _least(buckets: Iterable[Remaining]) -> Remaining:
    limited = [bucket for bucket in buckets if bucket.limit]
    return min(limited, key=lambda b: (b.remaining, -b.reset_ms, b.limit), default=Remaining())


class CacheVersions(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of the rows a gateway decided from. They only rise."""

    key: int
    tenant: int
    route: int


class Admit(msgspec.Struct, frozen=True, kw_only=True):
    """Ask to charge the tenant, and every further scope that the request counts in.

    `input_tokens` is net of the tenant's expected prefix match. `output_tokens` is the most
    it may produce; a bounded part of it is held at first, and 0 holds nothing.
    """

    ticket: str
    gateway: str
    tenant: str
    key: str
    model: str
    versions: CacheVersions
    limits: Limits  # the tenant's
    scopes: tuple[Scope, ...] = ()  # further ones, in the order in which they are told
    input_tokens: int
    output_tokens: int = 0

    @property
    def all_scopes(self) -> tuple[Scope, ...]:
        """The tenant's own, and the further ones."""
        return (Scope(name=TENANT_SCOPE, limits=self.limits), *self.scopes)


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """Charged and held. Admitting the same ticket again charges nothing more.

    `rooms` is what is left in each of `Admit.all_scopes`; `headroom` the least of it.
    """

    headroom: Headroom
    rooms: tuple[Headroom, ...] = ()
    degraded: bool = False


class LimitRefused(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was charged in any scope.

    Named is the first scope in order that stands in the way, and its first limit that does, in
    `Limits` order; the wait is until none would.
    """

    reason: str  # requests | input_tokens | output_tokens | concurrency
    scope: str = TENANT_SCOPE
    retry_after_ms: int
    headroom: Headroom
    rooms: tuple[Headroom, ...] = ()


class Output(NamedTuple):
    """All a ticket has produced so far, and the further scopes to hold it in if it is not held."""

    ticket: str
    total: int
    scopes: tuple[str, ...] = ()


class Stale(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was charged: what the gateway cached is out of date. Read again and retry."""

    key: bool = False
    tenant: bool = False
    route: bool = False


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for a replica. `kv_blocks` covers the prompt and every token it may produce."""

    ticket: str
    gateway: str
    pool: str
    tenant: str
    weight: int  # of the tenant in the fair queue, >= 1
    service_class: ServiceClass
    deadline_ms: int  # Unix milliseconds; 0 is none
    kv_blocks: int
    prompt_tokens: int
    prefix_hashes: tuple[str, ...] = ()  # coarse chain, longest last
    exclude: tuple[str, ...] = ()  # replicas already tried
    at_head: bool = False  # a NACKed ticket goes back to the front


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Go there now. `placement` numbers this replica's placements."""

    replica: str
    boot_id: str
    url: str
    placement: int
    prefix_matched: int = 0  # hashes of `Arm.prefix_hashes` this replica has seen


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting; a grant will come with a `renew`."""

    position: int  # at most so many are served up to it, itself included
    expected_wait_ms: int


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """Not to be served. Nothing is held in the pool; the tenant's charge still is."""

    # expired | fits_never | no_replica | batch_refused | over_share | too_late | queue_full
    reason: str
    expected_wait_ms: int = 0  # as it would have been; 0 where that is not known


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as gateways announce it to the pool, from the registry."""

    replica: str
    boot_id: str
    url: str
    version: str
    ready: bool
    kv_blocks: int
    sequences: int
    block_tokens: int = 16  # of one KV block
    can_resume: bool = True  # whether it takes a Choice with output_ids


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """A queued ticket's turn, or its end. Repeated until acknowledged."""

    ticket: str
    outcome: Placed | Dropped


class Renew(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's heartbeat to one pool. All of it is absolute, so repeating it is harmless."""

    gateway: str
    pool: str
    epoch: str  # the last epoch this gateway saw; "" at first
    replicas: tuple[ReplicaView, ...]
    loads: tuple[tuple[str, Load], ...] = ()  # replica id, newest report
    acks: tuple[str, ...] = ()  # tickets whose grant arrived
    held: tuple[tuple[Arm, Placed | None], ...] = ()  # everything in flight, after a new epoch
    announces: bool = False  # `held`, with that of the renews before this, is complete
    outputs: tuple[tuple[str, int], ...] = ()  # ticket, output tokens so far: absolute


class Renewed(msgspec.Struct, frozen=True, kw_only=True):
    """`reannounce`: the dispatcher does not know this gateway's tickets; send all as `held`.

    A grant is acted on only when it comes back in `confirmed`: one that was acknowledged too
    late has gone back to the queue, and perhaps elsewhere.
    """

    epoch: str
    grants: tuple[Grant, ...]
    reannounce: bool = False
    confirmed: tuple[Grant, ...] = ()  # the outcome of each ticket in `acks`
    congestion_ms: int = 0  # a newcomer's wait behind all that waits, batch aside
