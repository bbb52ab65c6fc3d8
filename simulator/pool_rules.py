"""What must hold of a dispatcher's pool after every call, and once it is idle."""

from collections import Counter

from core.dispatch import Pool
from core.placement import Replica


def pool_problems(pool: Pool) -> list[str]:
    """Each account is the sum of the tickets on it, and no ticket is in two places."""
    tickets: Counter[int] = Counter()
    blocks: Counter[int] = Counter()
    states: Counter[str] = Counter()
    for ticket in pool.tickets.values():
        states[ticket.state] += 1
        if ticket.number:
            tickets[ticket.number] += 1
            blocks[ticket.number] += ticket.kv_blocks
    found = [
        problem
        for replica in pool.replicas.values()
        for problem in _account_problems(replica, tickets[replica.number], blocks[replica.number])
    ]
    if states["queued"] != len(pool.queue):
        found.append(f"{states['queued']} tickets are queued, the queue has {len(pool.queue)}")
    if states["granted"] != len(pool.book.unacked):
        found.append(f"{states['granted']} grants, {len(pool.book.unacked)} of them watched")
    owned = Counter(gateway for gateway, names in pool.book.owned.items() for _ in names)
    if owned != Counter(ticket.gateway for ticket in pool.tickets.values()):
        found.append("gateways own other tickets than there are")
    return found


def room_problems(pool: Pool) -> list[str]:
    """No replica is given more than it has: while no gateway had to say what runs where."""
    return [
        f"{replica.replica} is given {replica.open} tickets of {replica.open_blocks} blocks, "
        f"and has {replica.total}"
        for replica in pool.replicas.values()
        if replica.open_blocks > replica.total or replica.open > replica.sequences > 0
    ]


def idle_problems(pool: Pool) -> list[str]:
    """Nothing is held by anybody."""
    found = [f"ticket {name} is {ticket.state}" for name, ticket in sorted(pool.tickets.items())]
    for replica in pool.replicas.values():
        held = (replica.open, replica.open_blocks, replica.unreported_blocks)
        if any(held):
            found.append(f"{replica.replica} holds {held} for nobody")
    for name, size in (("grants", len(pool.book.granted)), ("queued", len(pool.queue))):
        if size:
            found.append(f"{size} {name} for nobody")
    return found


def _account_problems(replica: Replica, tickets: int, blocks: int) -> list[str]:
    found: list[str] = []
    if (replica.open, replica.open_blocks) != (tickets, blocks):
        found.append(
            f"{replica.replica} has {replica.open} tickets of {replica.open_blocks} blocks open, "
            f"its tickets are {tickets} of {blocks}"
        )
    unreported = sum(placed.blocks for placed in replica.unreported.values())
    if replica.unreported_blocks != unreported:
        found.append(f"{replica.replica}: unreported blocks do not add up")
    if not 0 <= replica.reported_free <= replica.total and replica.open:
        found.append(f"{replica.replica}: {replica.reported_free} blocks free by report")
    return found
