"""A tenant's limits: three buckets that refill steadily, and a set of held tickets.

Not the fair queue (`core.dispatch`) and not money (`core.ledger`). `store/lua` runs the same
rules atomically; tests drive both with the same commands. Integers only: a token is 60,000
units, so a limit of n per minute refills n units each millisecond, exactly.

The invariant: whatever `admit` charged, `cancel` gives back; a refusal charges nothing.
"""

import msgspec

from core.tickets import (
    Admit,
    Admitted,
    CacheVersions,
    Headroom,
    LimitRefused,
    Limits,
    Remaining,
    Stale,
)

UNITS = 60_000  # units in one request or token
LIMIT_MAX = 10**10  # per minute; keeps every level an exact integer in Lua's doubles
DEBT_MAX = 2**51  # units


class LimitRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that are the same for every tenant."""

    lease_ms: int = 5_000  # a ticket nobody touched for so long is no longer held
    concurrency_retry_ms: int = 1_000  # what a caller over its concurrency is told to wait


class Held(msgspec.Struct, kw_only=True):
    """One ticket and what it was charged, in units, for `cancel` to give back.

    `charged` is false for a ticket heard of without its `admit`, after a lost memory: it
    counts as held, and neither refunds nor trues up what nobody remembers.
    """

    expires_ms: int
    charged: bool
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    output_total: int = 0  # tokens, as last told


class Buckets(msgspec.Struct, kw_only=True):
    """A tenant's state. A level is in units, None where there is no limit.

    `held` is in order of expiry: the clock is monotone and every touch moves to the end.
    """

    now_ms: int = 0
    limits: Limits = Limits()
    requests: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    held: dict[str, Held] = msgspec.field(default_factory=dict)


def check_versions(known: dict[str, int], asked: Admit) -> Stale | None:
    """Whether the gateway decided from rows older than what was pushed.

    `known` has entries `tenant`, `key:<id>`, `route:<model>`; an absent one is accepted.
    """
    versions: CacheVersions = asked.versions
    stale = Stale(
        key=versions.key < known.get(f"key:{asked.key}", 0),
        tenant=versions.tenant < known.get("tenant", 0),
        route=versions.route < known.get(f"route:{asked.model}", 0),
    )
    return stale if stale != Stale() else None


def admit(state: Buckets, asked: Admit, now_ms: int, rules: LimitRules) -> Admitted | LimitRefused:
    """Charge one request and its input, and hold its ticket; or charge nothing.

    Input above a whole bucket is charged as a whole bucket: a first request is never refused
    for its size. Output is charged as it is produced, and needs one token to start.
    """
    _advance(state, now_ms)
    _set_limits(state, asked.limits)
    if asked.ticket in state.held:
        _touch(state, asked.ticket, rules)
        return Admitted(headroom=_headroom(state))
    input_units = _input_units(state.limits, asked.input_tokens)
    refused = _refusal(state, input_units, rules)
    if refused is not None:
        return refused
    held = Held(expires_ms=0, charged=True, input_tokens=input_units)
    if state.requests is not None:
        state.requests -= UNITS
        held.requests = UNITS
    if state.input_tokens is not None:
        state.input_tokens -= input_units
    state.held[asked.ticket] = held
    _touch(state, asked.ticket, rules)
    return Admitted(headroom=_headroom(state))


def charge(
    state: Buckets, outputs: tuple[tuple[str, int], ...], now_ms: int, rules: LimitRules
) -> None:
    """Charge output by each ticket's absolute total, and keep the tickets held.

    A ticket not held is held from now on, and its total is where its charge starts.
    """
    _advance(state, now_ms)
    for ticket, total in outputs:
        held = state.held.get(ticket)
        if held is None:
            state.held[ticket] = Held(expires_ms=0, charged=False, output_total=total)
        else:
            _charge_output(state, held, total)
        _touch(state, ticket, rules)


def finish(
    state: Buckets, ticket: str, *, input_tokens: int, output_total: int, now_ms: int
) -> None:
    """Let go of the ticket and true up its charge to what was actually read and produced."""
    _advance(state, now_ms)
    held = state.held.pop(ticket, None)
    if held is None:
        return
    _charge_output(state, held, output_total)
    if held.charged and state.input_tokens is not None:
        # The actual size, even above a whole bucket: the average rate stays the limit.
        state.input_tokens -= input_tokens * UNITS - held.input_tokens
    _clamp(state)


def cancel(state: Buckets, ticket: str, now_ms: int) -> None:
    """Let go of the ticket and give back all that it was charged. Repeating it is harmless."""
    _advance(state, now_ms)
    held = state.held.pop(ticket, None)
    if held is None:
        return
    if state.requests is not None:
        state.requests += held.requests
    if state.input_tokens is not None:
        state.input_tokens += held.input_tokens
    if state.output_tokens is not None:
        state.output_tokens += held.output_tokens
    _clamp(state)


def refilled(level: int, limit: int, elapsed_ms: int) -> int:
    """The level after `elapsed_ms`, at most a whole bucket."""
    return min(limit * UNITS, level + elapsed_ms * limit)


def wait_ms(level: int, need: int, limit: int) -> int:
    """Milliseconds until a refilling bucket holds `need`; 0 when it does already."""
    return max(0, -(-(need - level) // limit))


def _advance(state: Buckets, now_ms: int) -> None:
    elapsed_ms = max(0, now_ms - state.now_ms)
    state.now_ms += elapsed_ms
    limits = state.limits
    if state.requests is not None:
        state.requests = refilled(state.requests, limits.requests_per_min, elapsed_ms)
    if state.input_tokens is not None:
        state.input_tokens = refilled(state.input_tokens, limits.input_tokens_per_min, elapsed_ms)
    if state.output_tokens is not None:
        state.output_tokens = refilled(
            state.output_tokens, limits.output_tokens_per_min, elapsed_ms
        )
    while state.held:
        ticket, held = next(iter(state.held.items()))
        if held.expires_ms > state.now_ms:
            break
        del state.held[ticket]


def _set_limits(state: Buckets, limits: Limits) -> None:
    """A bucket that is new, or was unlimited, starts full."""
    limits = Limits(
        requests_per_min=min(limits.requests_per_min, LIMIT_MAX),
        input_tokens_per_min=min(limits.input_tokens_per_min, LIMIT_MAX),
        output_tokens_per_min=min(limits.output_tokens_per_min, LIMIT_MAX),
        concurrency=limits.concurrency,
    )
    state.limits = limits
    state.requests = _fitted(state.requests, limits.requests_per_min)
    state.input_tokens = _fitted(state.input_tokens, limits.input_tokens_per_min)
    state.output_tokens = _fitted(state.output_tokens, limits.output_tokens_per_min)


def _fitted(level: int | None, limit: int) -> int | None:
    if limit == 0:
        return None
    full = limit * UNITS
    return full if level is None else max(-DEBT_MAX, min(full, level))


def _clamp(state: Buckets) -> None:
    _set_limits(state, state.limits)


def _touch(state: Buckets, ticket: str, rules: LimitRules) -> None:
    held = state.held.pop(ticket)
    held.expires_ms = state.now_ms + rules.lease_ms
    state.held[ticket] = held


def _input_units(limits: Limits, tokens: int) -> int:
    if limits.input_tokens_per_min == 0:
        return 0
    return min(tokens, limits.input_tokens_per_min) * UNITS


def _charge_output(state: Buckets, held: Held, total: int) -> None:
    tokens = max(0, total - held.output_total)
    held.output_total += tokens
    if state.output_tokens is not None:
        state.output_tokens = max(-DEBT_MAX, state.output_tokens - tokens * UNITS)
        held.output_tokens += tokens * UNITS


def _refusal(state: Buckets, input_units: int, rules: LimitRules) -> LimitRefused | None:
    """The first limit in `Limits` order; the wait is until all of them would pass."""
    limits = state.limits
    waits: list[tuple[str, int]] = []
    if state.requests is not None:
        waits.append(("requests", wait_ms(state.requests, UNITS, limits.requests_per_min)))
    if state.input_tokens is not None:
        needed = wait_ms(state.input_tokens, input_units, limits.input_tokens_per_min)
        waits.append(("input_tokens", needed))
    if state.output_tokens is not None:
        needed = wait_ms(state.output_tokens, UNITS, limits.output_tokens_per_min)
        waits.append(("output_tokens", needed))
    if 0 < limits.concurrency <= len(state.held):
        waits.append(("concurrency", rules.concurrency_retry_ms))
    failed = [(reason, wait) for reason, wait in waits if wait > 0]
    if not failed:
        return None
    return LimitRefused(
        reason=failed[0][0],
        retry_after_ms=max(wait for _, wait in failed),
        headroom=_headroom(state),
    )


def _headroom(state: Buckets) -> Headroom:
    limits = state.limits
    return Headroom(
        requests=_remaining(state.requests, limits.requests_per_min),
        input_tokens=_remaining(state.input_tokens, limits.input_tokens_per_min),
        output_tokens=_remaining(state.output_tokens, limits.output_tokens_per_min),
    )


def _remaining(level: int | None, limit: int) -> Remaining:
    if level is None:
        return Remaining()
    return Remaining(
        limit=limit,
        remaining=max(0, level // UNITS),
        reset_ms=wait_ms(level, limit * UNITS, limit),
    )
