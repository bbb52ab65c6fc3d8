"""How much of an amount fits under limits, and what a refusal says: pure arithmetic.

Invariant: what is granted takes no limit over its cap. A limit may be over it already, lowered
under what is held; then nothing above 0 fits.
"""

import msgspec

from core.metering import LedgerRefused


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on posted + reserved, whatever keeps it."""

    name: str
    cap_micro: int
    posted_micro: int
    reserved_micro: int

    @property
    def room_micro(self) -> int:
        """What more may be held; below 0 when the cap was lowered under what is."""
        return self.cap_micro - self.posted_micro - self.reserved_micro


def floor_micro(floor: int | None, amount: int) -> int:
    """The least that will do, of an amount asked for."""
    return amount if floor is None else floor


def granted_micro(limits: list[Limit], wanted: int, floor: int) -> int | LedgerRefused:
    """How much of `wanted` fits under every limit, if that is `floor` at least.

    Else the first limit in whose way the floor is, and what would have fitted under all.
    """
    room = min((limit.room_micro for limit in limits), default=wanted)
    if room >= floor:
        return min(wanted, room)
    first = next(limit for limit in limits if limit.room_micro < floor)
    return LedgerRefused(
        reason="hard_cap",
        limit=first.name,
        reserved_micro=first.reserved_micro,
        posted_micro=first.posted_micro,
        hard_cap_micro=first.cap_micro,
        fits_micro=max(0, room),
    )
