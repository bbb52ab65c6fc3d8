"""How long a name or an address waits after failed sign-ins: longer with each.

Few failures are typing errors and cost nothing. What follows doubles up to a bound, so that an
attacker gets a few tries an hour and an owner who comes back later gets in. An attempt counts
as failed when it begins and is forgiven when it succeeds: any number at once get no more tries
than one after the other.
"""

import msgspec

DOUBLINGS_MAX = 30  # more would only make large numbers on the way to the bound


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """`free` attempts cost nothing; then `first_ms`, doubled each time up to `most_ms`.

    A failure is forgotten `forget_ms` after the last one.
    """

    free: int
    first_ms: int
    most_ms: int
    forget_ms: int


class Attempts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a name or an address."""

    failures: int = 0
    last_ms: int = 0
    until_ms: int = 0


def wait_ms(attempts: Attempts, *, now_ms: int) -> int:
    """How long until the next attempt may begin; 0 for now."""
    return max(0, attempts.until_ms - now_ms)


def begun(attempts: Attempts, patience: Patience, *, now_ms: int) -> Attempts:
    """After an attempt that was let in, counted as failed until it is forgiven."""
    stale = now_ms - attempts.last_ms >= patience.forget_ms
    failures = 1 if stale else attempts.failures + 1
    over = failures - patience.free
    pause_ms = 0
    if over >= 0:
        pause_ms = min(patience.most_ms, patience.first_ms << min(over, DOUBLINGS_MAX))
    return Attempts(failures=failures, last_ms=now_ms, until_ms=now_ms + pause_ms)


def forgiven(attempts: Attempts) -> Attempts:
    """After one that succeeded, where others' failures stay: an address of many people's."""
    return Attempts(failures=max(0, attempts.failures - 1), last_ms=attempts.last_ms)
