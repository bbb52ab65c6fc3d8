"""Tenants: what they ask for, how often, and when they lose patience.

They share prompts, as products built on one system prompt do, so that a prefix of one tenant
is often the prefix of another. Invariant: everything drawn here comes from the seed alone.
"""

from collections.abc import Callable
from random import Random
from typing import Protocol

from core.protocol import Sampling
from core.tickets import Limits
from simulator.clock import Clock
from simulator.model import VOCAB_SIZE
from simulator.orders import Order, Profile, an_order

STOPS = ("a", "th", "e ", "qu")
BUSY_MS = 100  # without a ready gateway, until the next look
FIRST_MS = 600  # some come while the system is still starting
FOLLOWS_AT_ONCE = 0.33  # the chance that an order is one of a burst
HAS_STOP = 0.2
IS_IMPATIENT = 0.25


class Door(Protocol):
    """Where orders go."""

    def enter(self, order: Order) -> bool:
        """False: no gateway takes requests just now."""

    def leave(self, order: Order) -> None:
        """The client closed its connection."""


class Crowd:
    """All tenants. `left` orders are still to come."""

    def __init__(
        self, clock: Clock, dice: Random, door: Door, *, orders: int, context_tokens: int
    ) -> None:
        self.left = orders
        self.profiles = profiles(dice)
        self._clock = clock
        self._dice = dice
        self._door = door
        self._context_tokens = context_tokens
        self._numbers = 0
        self._openings = [_ids(dice, dice.randint(6, 24)) for _ in range(3)]
        for profile in self.profiles:
            clock.after(FIRST_MS, f"{profile.tenant} arrives", self._planner(profile))

    def _planner(self, profile: Profile) -> Callable[[], None]:
        return lambda: self._plan(profile)

    def _plan(self, profile: Profile) -> None:
        dice = self._dice
        is_burst = dice.random() < FOLLOWS_AT_ONCE
        gap_ms = 0 if is_burst else int(dice.expovariate(1 / profile.gap_ms))
        self._clock.after(gap_ms, f"{profile.tenant} asks", lambda: self._ask(profile))

    def _ask(self, profile: Profile) -> None:
        if self.left == 0:
            return
        order = self._order(profile)
        if not self._door.enter(order):
            self._clock.after(BUSY_MS, f"{profile.tenant} asks", lambda: self._ask(profile))
            return
        self.left -= 1
        if order.patience_ms:
            label = f"{order.request_id} client leaves"
            self._clock.after(order.patience_ms, label, self._leaver(order))
        self._plan(profile)

    def _leaver(self, order: Order) -> Callable[[], None]:
        def leave() -> None:
            if not order.over:
                order.client_left = True
                self._door.leave(order)

        return leave

    def _order(self, profile: Profile) -> Order:
        dice, now_ms = self._dice, self._clock.now_ms
        self._numbers += 1
        opening = dice.choice(self._openings)
        prompt = (*opening[: dice.randint(1, len(opening))], *_ids(dice, dice.randint(1, 24)))
        room = self._context_tokens - len(prompt)
        sampling = Sampling(
            seed=dice.randrange(1 << 32),
            max_tokens=min(room, dice.choice((1, 4, 8, 12, 16, 24, room))),
            temperature=dice.choice((0.0, 1.0)),
            stop=(dice.choice(STOPS),) if dice.random() < HAS_STOP else (),
        )
        return an_order(
            f"r{self._numbers}",
            profile,
            prompt,
            sampling,
            choices=dice.choice((1, 1, 1, 1, 1, 1, 2, 3)),
            context_tokens=self._context_tokens,
            deadline_ms=now_ms + dice.choice((300, 3_000, 30_000, 30_000, 60_000)),
            patience_ms=dice.randint(1, 800) if dice.random() < IS_IMPATIENT else 0,
            arrived_ms=now_ms,
        )


def profiles(dice: Random) -> list[Profile]:
    """One tenant of each character."""
    return [
        _profile(dice, "ten_free", Limits(), gap_ms=300),
        _profile(dice, "ten_few", Limits(concurrency=3), gap_ms=250, weight=3),
        _profile(dice, "ten_capped", Limits(), gap_ms=400, hard_cap_micro=dice.randint(150, 1_200)),
        _profile(dice, "ten_metered", _some_limits(dice), gap_ms=300),
    ]


def _some_limits(dice: Random) -> Limits:
    """Reached within a run: a bucket begins full."""
    return Limits(
        requests_per_min=dice.choice((0, 12)),
        input_tokens_per_min=dice.choice((0, 400)),
        output_tokens_per_min=dice.choice((0, 150)),
        concurrency=dice.choice((0, 2)),
    )


def _profile(
    dice: Random,
    tenant: str,
    limits: Limits,
    *,
    gap_ms: int,
    weight: int = 1,
    hard_cap_micro: int | None = None,
) -> Profile:
    return Profile(
        tenant=tenant,
        salt=dice.randbytes(16),
        limits=limits,
        weight=weight,
        hard_cap_micro=hard_cap_micro,
        gap_ms=gap_ms,
        service_class=dice.choice(("interactive", "standard", "batch")),
    )


def _ids(dice: Random, number: int) -> tuple[int, ...]:
    return tuple(dice.randrange(1, VOCAB_SIZE) for _ in range(number))
