"""A replica as the dispatcher accounts for it, and the choice of one for a request.

Not the queue, and no promise: the worker may still decline. What is free is the smaller of
two accounts: the last report less what was placed after it, and the whole less what open
tickets may grow to. Reports only correct; with nothing open the whole replica is free,
however old its last report.
"""

from collections.abc import Iterable, Mapping

import msgspec

from core.protocol import Load
from core.tickets import ReplicaView

SCORE_ONE = 1_000_000  # a score of 1
RETIRED_BOOTS_MAX = 4


class PlacementRules(msgspec.Struct, frozen=True, kw_only=True):
    """How replicas are judged. The weights are relative to each other."""

    replica_silent_ms: int = 5_000  # in no gateway's view for so long: gone
    decline_pause_ms: int = 250  # before a replica that declined is tried again
    weight_prefix: int = 3
    weight_free: int = 2
    weight_load: int = 2


class Unreported(msgspec.Struct, frozen=True):
    """A placement that no report includes yet."""

    placement: int
    blocks: int


class Replica(msgspec.Struct, kw_only=True):
    """One life of one replica. `number` is this life's, unique in its pool's epoch."""

    replica: str
    boot_id: str
    url: str
    number: int
    ready: bool
    total: int  # KV blocks
    sequences: int  # at once; 0 is unlimited
    seen_ms: int  # when a gateway last had it in view
    paused_until_ms: int = 0
    retired: list[str] = msgspec.field(default_factory=list)  # earlier boot ids
    placed: int = 0  # number of the last placement
    report_seq: int = -1
    reported: int = 0  # number of the last placement inside the last report
    reported_free: int = 0  # of the last report, and what reported tickets freed since
    open: int = 0  # tickets
    open_blocks: int = 0
    unreported: dict[str, Unreported] = msgspec.field(default_factory=dict)  # by ticket
    unreported_blocks: int = 0


def free_blocks(replica: Replica) -> int:
    """The account: never negative, and all of it when nothing of ours is open there."""
    if replica.open == 0:
        return replica.total
    after_report = replica.reported_free - replica.unreported_blocks
    return max(0, min(after_report, replica.total - replica.open_blocks))


def usable(replica: Replica, now_ms: int, rules: PlacementRules) -> bool:
    """Ready, in some gateway's view, and not pausing."""
    return present(replica, now_ms, rules) and now_ms >= replica.paused_until_ms


def present(replica: Replica, now_ms: int, rules: PlacementRules) -> bool:
    """Ready and in some gateway's view, be it pausing or full."""
    return replica.ready and now_ms - replica.seen_ms <= rules.replica_silent_ms


def fits(replica: Replica, blocks: int) -> bool:
    """Whether the account has room for one more ticket of `blocks`."""
    has_slot = replica.sequences == 0 or replica.open < replica.sequences
    return has_slot and blocks <= free_blocks(replica)


def candidates(
    replicas: Iterable[Replica],
    blocks: int,
    exclude: tuple[str, ...],
    now_ms: int,
    rules: PlacementRules,
) -> list[Replica]:
    """Replicas that could ever hold it. Excluded ones come back when there are no others."""
    able = [r for r in replicas if r.total >= blocks and present(r, now_ms, rules)]
    wanted = [r for r in able if r.replica not in exclude]
    return [r for r in wanted or able if usable(r, now_ms, rules)]


def choose(
    able: Iterable[Replica],
    *,
    blocks: int,
    matched: Mapping[int, int],
    hash_count: int,
    protected: int,
    rules: PlacementRules,
) -> Replica | None:
    """The fitting replica with the best score, then the fewest tickets, then the first name.

    `matched` maps a replica's number to the hashes it has seen; `protected` is the number of
    a replica that is kept for somebody else, 0 for none.
    """
    fitting = [r for r in able if r.number != protected and fits(r, blocks)]
    return min(
        fitting,
        key=lambda r: (-score(r, matched.get(r.number, 0), hash_count, rules), r.open, r.replica),
        default=None,
    )


def protect(able: Iterable[Replica]) -> int:
    """The number of the replica to keep for a ticket that fits nowhere yet; 0 for none.

    The freest: while others are kept off it only grows freer, so the ticket's turn comes.
    """
    freest = min(able, key=lambda r: (-free_blocks(r), r.replica), default=None)
    return 0 if freest is None else freest.number


def score(replica: Replica, matched: int, hash_count: int, rules: PlacementRules) -> int:
    """Between 0 and `SCORE_ONE`: how much is cached there, how much is free, how idle it is."""
    cached = matched * SCORE_ONE // hash_count if hash_count else 0
    free = free_blocks(replica) * SCORE_ONE // replica.total if replica.total else 0
    weighted = (
        rules.weight_prefix * cached
        + rules.weight_free * free
        + rules.weight_load * _idleness(replica)
    )
    return weighted // (rules.weight_prefix + rules.weight_free + rules.weight_load)


def hold(replica: Replica, ticket: str, placement: int, blocks: int) -> None:
    """Open a ticket there under this placement number."""
    replica.placed = max(replica.placed, placement)
    if replica.open == 0:
        replica.reported_free = replica.total
    replica.open += 1
    replica.open_blocks += blocks
    if placement > replica.reported:
        replica.unreported[ticket] = Unreported(placement, blocks)
        replica.unreported_blocks += blocks


def release(replica: Replica, ticket: str, blocks: int) -> None:
    """Close what `hold` opened."""
    replica.open -= 1
    replica.open_blocks -= blocks
    unreported = replica.unreported.pop(ticket, None)
    if unreported is not None:
        replica.unreported_blocks -= unreported.blocks
    else:
        replica.reported_free = min(replica.total, replica.reported_free + blocks)


def report(replica: Replica, load: Load) -> None:
    """Take an absolute report, unless it is of another life or older than the last one."""
    if load.boot_id != replica.boot_id or load.seq <= replica.report_seq:
        return
    replica.report_seq = load.seq
    replica.reported = max(replica.reported, load.placed_seq)
    replica.reported_free = min(replica.total, load.kv_blocks_free)
    for ticket, placed in list(replica.unreported.items()):
        if placed.placement <= replica.reported:
            replica.unreported_blocks -= replica.unreported.pop(ticket).blocks


def announce(known: Replica | None, view: ReplicaView, number: int, now_ms: int) -> Replica:
    """The replica as a gateway has it in view: a new life starts a new account under `number`.

    A view of an earlier life, from a gateway that is behind, changes nothing.
    """
    if known is not None and view.boot_id in known.retired:
        return known
    if known is not None and view.boot_id == known.boot_id:
        known.url, known.ready = view.url, view.ready
        known.total, known.sequences = view.kv_blocks, view.sequences
        known.seen_ms = now_ms
        return known
    retired = [] if known is None else [*known.retired, known.boot_id][-RETIRED_BOOTS_MAX:]
    return Replica(
        replica=view.replica,
        boot_id=view.boot_id,
        url=view.url,
        number=number,
        ready=view.ready,
        total=view.kv_blocks,
        sequences=view.sequences,
        seen_ms=now_ms,
        retired=retired,
        placed=0 if known is None else known.placed,
    )


def _idleness(replica: Replica) -> int:
    if replica.sequences == 0:
        return SCORE_ONE // (1 + replica.open)
    return max(0, replica.sequences - replica.open) * SCORE_ONE // replica.sequences
