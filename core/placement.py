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
    decline_pause_ms: int = 50  # before a replica that declined is tried again, a step or two
    decline_pause_max_ms: int = 1_000  # twice as long each time, while it declines again and again
    weight_prefix: int = 3
    weight_free: int = 2
    weight_load: int = 2
    looks_max: int = 16  # of the freest replicas, and as many that have seen the prefix
    # A seen prefix counts for nothing on a replica with more tickets than `affinity_floor` and
    # than this much of the mean: bounded loads (Mirrokni et al. 2018), so that it spills.
    affinity_percent: int = 150
    affinity_floor: int = 4
    # A lane for tenants that have nothing open, so that one that asks now and then need not
    # wait for a flood: one slot of a replica with so many, and so much of its KV blocks.
    lane_slots_from: int = 8
    lane_percent: int = 3


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
    pause_ms: int = 0  # the last one
    retired: list[str] = msgspec.field(default_factory=list)  # earlier boot ids
    placed: int = 0  # number of the last placement
    report_seq: int = -1
    reported: int = 0  # number of the last placement inside the last report
    reported_free: int = 0  # of the last report, and what reported tickets freed since
    open: int = 0  # tickets
    open_blocks: int = 0
    lane_open: int = 0  # of these, tickets in the lane
    lane_blocks: int = 0
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


def room(replica: Replica) -> int:
    """The largest ticket that fits; 0 without a free slot."""
    has_slot = replica.sequences == 0 or replica.open < replica.sequences
    return free_blocks(replica) if has_slot else 0


def fits(replica: Replica, blocks: int) -> bool:
    """Whether the account has room for one more ticket of `blocks`, at least one."""
    return blocks <= room(replica)


def takes(replica: Replica, blocks: int, rules: PlacementRules) -> bool:
    """Whether one more ticket fits beside the lane. With nothing open there is none to keep."""
    if replica.open == 0:
        return fits(replica, blocks)
    if not _has_lane(replica, rules):
        return fits(replica, blocks)
    if replica.sequences and replica.open - replica.lane_open >= replica.sequences - 1:
        return False
    kept = max(0, _lane_size(replica, rules) - replica.lane_blocks)
    return fits(replica, blocks + kept)


def lane_takes(replica: Replica, blocks: int, rules: PlacementRules) -> bool:
    """Whether one more ticket fits into the lane: by its slot, or by blocks without slots."""
    if not _has_lane(replica, rules) or not fits(replica, blocks):
        return False
    if replica.sequences:
        return replica.lane_open == 0
    return replica.lane_blocks + blocks <= _lane_size(replica, rules)


def holds_affinity(replica: Replica, open_tickets: int, ready: int, rules: PlacementRules) -> bool:
    """Whether a prefix it has seen speaks for it: not while it has more than its load.

    `open_tickets` are those of all `ready` replicas.
    """
    if replica.open < rules.affinity_floor:
        return True
    return 100 * (replica.open + 1) * ready <= rules.affinity_percent * (open_tickets + 1)


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


def best(
    able: Iterable[Replica], matched: Mapping[int, int], hash_count: int, rules: PlacementRules
) -> Replica | None:
    """The replica with the best score, then the fewest tickets, then the first name.

    `matched` maps a replica's number to the hashes it has seen of `hash_count`.
    """
    return min(
        able,
        key=lambda r: (-score(r, matched.get(r.number, 0), hash_count, rules), r.open, r.replica),
        default=None,
    )


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


def hold(
    replica: Replica, ticket: str, placement: int, blocks: int, *, in_lane: bool = False
) -> None:
    """Open a ticket there under this placement number."""
    replica.placed = max(replica.placed, placement)
    if replica.open == 0:
        replica.reported_free = replica.total
    replica.open += 1
    replica.open_blocks += blocks
    if in_lane:
        replica.lane_open += 1
        replica.lane_blocks += blocks
    if placement > replica.reported:
        replica.unreported[ticket] = Unreported(placement, blocks)
        replica.unreported_blocks += blocks


def release(replica: Replica, ticket: str, blocks: int, *, in_lane: bool = False) -> None:
    """Close what `hold` opened."""
    replica.open -= 1
    replica.open_blocks -= blocks
    if in_lane:
        replica.lane_open -= 1
        replica.lane_blocks -= blocks
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


def _has_lane(replica: Replica, rules: PlacementRules) -> bool:
    return replica.sequences == 0 or replica.sequences >= rules.lane_slots_from


def _lane_size(replica: Replica, rules: PlacementRules) -> int:
    return replica.total * rules.lane_percent // 100


def _idleness(replica: Replica) -> int:
    if replica.sequences == 0:
        return SCORE_ONE // (1 + replica.open)
    return max(0, replica.sequences - replica.open) * SCORE_ONE // replica.sequences
