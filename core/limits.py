"""A tenant's limits: buckets that refill steadily in each scope, and a set of held tickets.

Not the fair queue (`core.dispatch`) and not money (`core.ledger`). `store/lua` runs the same
rules atomically; tests drive both with the same commands. Integers only: a token is 60,000
units, so a limit of n per minute refills n units each millisecond, exactly.

A ticket counts in the tenant's scope and in every further one it names (`core.scopes`).
The invariant: whatever `admit` charged, in all of them, `cancel` gives back; a refusal charges
nothing in any; and a scope counts exactly the tickets held that name it.
"""

from collections.abc import Iterable

import msgspec

from core.tickets import (
    TENANT_SCOPE,
    Admit,
    Admitted,
    CacheVersions,
    Headroom,
    LimitRefused,
    Limits,
    Output,
    Remaining,
    Scope,
    Seen,
    Stale,
    tightest_rooms,
)

UNITS = 60_000  # units in one request or token
LIMIT_MAX = 10**10  # per minute; keeps every level an exact integer in Lua's doubles
DEBT_MAX = 2**51  # units

REQUESTS, INPUT, OUTPUT = range(3)
REASONS = ("requests", "input_tokens", "output_tokens")
NOTHING = (0, 0, 0)


class LimitRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that are the same for every tenant."""

    lease_ms: int = 5_000  # a ticket nobody touched for so long is no longer held
    concurrency_retry_ms: int = 1_000  # what a caller over its concurrency is told to wait
    output_hold_tokens: int = 256  # of an answer to come, charged before it does
    lapsed_max: int = 512  # past their lease, that one call lets go of
    forget_max: int = 4  # scopes as good as new that one call forgets


class Bucket(msgspec.Struct, kw_only=True):
    """One scope's state at `at_ms`, by `REASONS`. A level is in units, None without a limit."""

    at_ms: int = 0
    concurrency: int = 0
    per_min: list[int] = msgspec.field(default_factory=lambda: list(NOTHING))
    levels: list[int | None] = msgspec.field(default_factory=lambda: [None, None, None])
    held: int = 0  # tickets
    idle_ms: int = 0  # from when on it is as good as new, if it holds nothing


class Held(msgspec.Struct, kw_only=True):
    """One ticket and what each of its scopes was charged, in units, for `cancel` to give back.

    `charged` is false for a ticket heard of without its `admit`, after a lost memory: it
    counts as held, and neither refunds nor trues up what nobody remembers.
    """

    expires_ms: int
    charged: bool
    output_from: int = 0  # tokens that nobody here is to be charged for
    output_total: int = 0  # tokens, as last told
    scopes: dict[str, list[int]]


class Buckets(msgspec.Struct, kw_only=True):
    """A tenant's state.

    `held` is in order of expiry: the clock is monotone and every touch moves to the end.
    """

    now_ms: int = 0
    scopes: dict[str, Bucket] = msgspec.field(default_factory=dict)
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
    """Charge one request, its input and a part of its answer, and hold its ticket; or nothing.

    Input above a whole bucket is charged as a whole bucket: a first request is never refused
    for its size. Of an answer's tokens at most `output_hold_tokens` are charged before they
    are produced, and never more than there are: one is enough to start.
    """
    call = _Call(state, now_ms, rules)
    scopes = asked.all_scopes
    for scope in scopes:
        _set_limits(call.open(scope.name), scope.limits)
    held = call.find(asked.ticket)
    refused = None if held is not None else _refusal(call, asked)
    if refused is None:
        call.touch(asked.ticket, held or _charged(call, asked))
    call.close()
    rooms = tuple(_room(state.scopes[scope.name]) for scope in scopes)
    headroom = tightest_rooms(rooms)
    if refused is None:
        return Admitted(headroom=headroom, rooms=rooms)
    name, reason, retry_after_ms = refused
    return LimitRefused(
        reason=reason, scope=name, retry_after_ms=retry_after_ms, headroom=headroom, rooms=rooms
    )


def look(
    state: Buckets, scopes: tuple[Scope, ...], now_ms: int, rules: LimitRules
) -> tuple[Seen, ...]:
    """What a request in these scopes would find, under these limits. Changes nothing."""
    copy = msgspec.convert(msgspec.to_builtins(state), Buckets)
    call = _Call(copy, now_ms, msgspec.structs.replace(rules, forget_max=0))
    for scope in scopes:
        _set_limits(call.open(scope.name), scope.limits)
    opened = [copy.scopes[scope.name] for scope in scopes]
    return tuple(Seen(room=_room(bucket), held=bucket.held) for bucket in opened)


def charge(state: Buckets, outputs: Iterable[Output], now_ms: int, rules: LimitRules) -> None:
    """Charge output by each ticket's absolute total, and keep the tickets held.

    A ticket not held is held from now on, and its total is where its charge starts.
    """
    call = _Call(state, now_ms, rules)
    for ticket, total, scopes in outputs:
        held = call.find(ticket)
        if held is None:
            held = call.hold((TENANT_SCOPE, *scopes), charged=False)
            held.output_from = held.output_total = total
        elif total > held.output_total:
            held.output_total = total
            _charge_output(call, held)
        call.touch(ticket, held)
    call.close()


def finish(
    state: Buckets,
    ticket: str,
    *,
    input_tokens: int,
    output_total: int,
    now_ms: int,
    rules: LimitRules,
) -> None:
    """Let go of the ticket and true up its charge to what was actually read and produced."""
    call = _Call(state, now_ms, rules)
    held = call.find(ticket)
    if held is not None:
        produced = max(held.output_total, output_total) - held.output_from
        for name, units in held.scopes.items():
            bucket = call.open(name)
            if held.charged:
                # The actual size, even above a whole bucket: the average rate stays the limit.
                _refund(bucket, INPUT, units[INPUT] - input_tokens * UNITS)
            _refund(bucket, OUTPUT, units[OUTPUT] - produced * UNITS)
        call.let_go(ticket)
    call.close()


def cancel(state: Buckets, ticket: str, now_ms: int, rules: LimitRules) -> None:
    """Let go of the ticket and give back all that it was charged. Repeating it is harmless."""
    call = _Call(state, now_ms, rules)
    held = call.find(ticket)
    if held is not None:
        for name, units in held.scopes.items():
            for i, charged in enumerate(units):
                _refund(call.open(name), i, charged)
        call.let_go(ticket)
    call.close()


def restore(state: Buckets, scope: Scope, room: Headroom, at_ms: int, rules: LimitRules) -> None:
    """Begin a scope from what was heard of it at `at_ms`, debts included, with nothing held."""
    call = _Call(state, at_ms, rules)
    bucket = call.open(scope.name)
    _set_limits(bucket, scope.limits)
    for i, left in enumerate((room.requests, room.input_tokens, room.output_tokens)):
        if bucket.levels[i] is not None and left.limit:
            level = left.limit * (UNITS - left.reset_ms)
            bucket.levels[i] = _clamped(level, bucket.per_min[i])
    call.close()


def refilled(level: int, limit: int, elapsed_ms: int) -> int:
    """The level after `elapsed_ms`, at most a whole bucket."""
    return min(limit * UNITS, level + elapsed_ms * limit)


def wait_ms(level: int, need: int, limit: int) -> int:
    """Milliseconds until a refilling bucket holds `need`; 0 when it does already."""
    return max(0, -(-(need - level) // limit))


class _Call:
    """One call's work: time is brought up to now, and of what it opens the end is noted."""

    def __init__(self, state: Buckets, now_ms: int, rules: LimitRules) -> None:
        self.state = state
        self.rules = rules
        self._opened: dict[str, Bucket] = {}
        state.now_ms = self.now_ms = max(state.now_ms, now_ms)
        self._forget()
        self._sweep()

    def open(self, name: str) -> Bucket:
        """The scope's state, refilled; one nobody knows is as good as new."""
        bucket = self._opened.get(name)
        if bucket is None:
            bucket = self.state.scopes.setdefault(name, Bucket(at_ms=self.now_ms))
            self._opened[name] = bucket
            elapsed_ms, bucket.at_ms = self.now_ms - bucket.at_ms, self.now_ms
            for i, level in enumerate(bucket.levels):
                if level is not None:
                    bucket.levels[i] = refilled(level, bucket.per_min[i], elapsed_ms)
        return bucket

    def close(self) -> None:
        """Note from when on each scope will be as good as new."""
        for bucket in self._opened.values():
            room = _room(bucket)
            full_ms = max(
                r.reset_ms for r in (room.requests, room.input_tokens, room.output_tokens)
            )
            lease_ms = self.rules.lease_ms if bucket.held else 0
            bucket.idle_ms = self.now_ms + full_ms + lease_ms

    def find(self, ticket: str) -> Held | None:
        """None for one past its lease, which is let go of."""
        held = self.state.held.get(ticket)
        if held is not None and held.expires_ms <= self.now_ms:
            self.let_go(ticket)
            return None
        return held

    def hold(self, names: Iterable[str], *, charged: bool) -> Held:
        """A ticket to be touched, which counts in these scopes."""
        held = Held(expires_ms=0, charged=charged, scopes={name: list(NOTHING) for name in names})
        for name in held.scopes:
            self.open(name).held += 1
        return held

    def touch(self, ticket: str, held: Held) -> None:
        """Held for another lease."""
        self.state.held.pop(ticket, None)
        held.expires_ms = self.now_ms + self.rules.lease_ms
        self.state.held[ticket] = held

    def let_go(self, ticket: str) -> None:
        """It counts nowhere any more."""
        for name in self.state.held.pop(ticket).scopes:
            self.open(name).held -= 1

    def _forget(self) -> None:
        scopes = self.state.scopes
        idle = sorted((b.idle_ms, name) for name, b in scopes.items() if b.idle_ms <= self.now_ms)
        for _, name in idle[: self.rules.forget_max]:
            if scopes[name].held:
                scopes[name].idle_ms = self.now_ms + self.rules.lease_ms
            else:
                del scopes[name]

    def _sweep(self) -> None:
        gone = []
        for ticket, held in self.state.held.items():
            if held.expires_ms > self.now_ms:
                break
            gone.append((held.expires_ms, ticket))
        for _, ticket in sorted(gone)[: self.rules.lapsed_max]:
            self.let_go(ticket)


def _set_limits(bucket: Bucket, limits: Limits) -> None:
    """A bucket that is new, or was unlimited, starts full."""
    bucket.concurrency = limits.concurrency
    per_min = (limits.requests_per_min, limits.input_tokens_per_min, limits.output_tokens_per_min)
    for i, asked in enumerate(per_min):
        limit = bucket.per_min[i] = min(asked, LIMIT_MAX)
        level = bucket.levels[i]
        bucket.levels[i] = _clamped(limit * UNITS if level is None else level, limit)


def _clamped(level: int, limit: int) -> int | None:
    return max(-DEBT_MAX, min(limit * UNITS, level)) if limit else None


def _refund(bucket: Bucket, i: int, units: int) -> None:
    """Give units back, or take them where negative."""
    level = bucket.levels[i]
    if level is not None:
        bucket.levels[i] = _clamped(level + units, bucket.per_min[i])


def _input_units(bucket: Bucket, tokens: int) -> int:
    return min(tokens, bucket.per_min[INPUT]) * UNITS


def _charged(call: _Call, asked: Admit) -> Held:
    held = call.hold((scope.name for scope in asked.all_scopes), charged=True)
    for name, units in held.scopes.items():
        bucket = call.open(name)
        units[INPUT] = _input_units(bucket, asked.input_tokens)
        if bucket.levels[REQUESTS] is not None:
            units[REQUESTS] = UNITS
        output = bucket.levels[OUTPUT]
        if output is not None:
            most = min(asked.output_tokens, call.rules.output_hold_tokens)
            units[OUTPUT] = min(most, output // UNITS) * UNITS
        for i, charged in enumerate(units):
            _refund(bucket, i, -charged)
    return held


def _charge_output(call: _Call, held: Held) -> None:
    """What was held for the answer to come is used up first."""
    due = (held.output_total - held.output_from) * UNITS
    for name, units in held.scopes.items():
        bucket = call.open(name)
        if bucket.levels[OUTPUT] is not None and due > units[OUTPUT]:
            _refund(bucket, OUTPUT, units[OUTPUT] - due)
            units[OUTPUT] = due


def _refusal(call: _Call, asked: Admit) -> tuple[str, str, int] | None:
    """The first scope's first limit that is in the way; the wait until nothing would be."""
    failed = [
        (scope.name, reason, wait)
        for scope in asked.all_scopes
        for reason, wait in _waits(call.open(scope.name), asked.input_tokens, call.rules)
        if wait > 0
    ]
    if not failed:
        return None
    name, reason, _ = failed[0]
    return name, reason, max(wait for _, _, wait in failed)


def _waits(bucket: Bucket, input_tokens: int, rules: LimitRules) -> Iterable[tuple[str, int]]:
    needs = (UNITS, _input_units(bucket, input_tokens), UNITS)
    for i, level in enumerate(bucket.levels):
        if level is not None:
            yield REASONS[i], wait_ms(level, needs[i], bucket.per_min[i])
    if 0 < bucket.concurrency <= bucket.held:
        yield "concurrency", rules.concurrency_retry_ms


def _room(bucket: Bucket) -> Headroom:
    rooms = [
        Remaining()
        if level is None
        else Remaining(
            limit=limit,
            remaining=max(0, level // UNITS),
            reset_ms=wait_ms(level, limit * UNITS, limit),
        )
        for level, limit in zip(bucket.levels, bucket.per_min, strict=True)
    ]
    return Headroom(
        requests=rooms[REQUESTS], input_tokens=rooms[INPUT], output_tokens=rooms[OUTPUT]
    )
