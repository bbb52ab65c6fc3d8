"""A run's summary as data, and the failure that carries its seed and its last events."""

from collections import Counter

import msgspec

from simulator.orders import Orders


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did. `history` is the same for the same seed, faults and code."""

    seed: int
    faults: tuple[str, ...]
    strikes: dict[str, int]
    requests: int
    ends: dict[str, int]  # by cause; `gateway_died` where nobody was left to decide
    refusals: dict[str, int]
    attempts: int
    resumes: int  # attempts that began with tokens of earlier ones
    produced_tokens: int
    delivered_tokens: int
    metered_tokens: int
    overage_micro: int  # billed beyond what was reserved
    preemptions: int
    events: int
    history: str
    virtual_s: float


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How fast it was: the only numbers that differ from run to run."""

    real_s: float
    events_per_s: int


class SimulationError(Exception):
    """An invariant broke, or a module raised. The message is all that is needed to replay it."""

    def __init__(
        self, problem: str, *, seed: int, replay: str, events: int, tail: list[str]
    ) -> None:
        self.problem = problem
        self.seed = seed
        last = "\n".join(tail)
        super().__init__(
            f"seed {seed}: {problem}\n"
            f"after {events} events; replay: {replay}\n"
            f"last events (ms, what):\n{last}"
        )


def ends_of(orders: Orders) -> dict[str, int]:
    """Orders by their end."""
    causes = (order.cause or "gateway_died" for order in orders.all.values() if order.over)
    return dict(sorted(Counter(map(str, causes)).items()))


def refusals_of(orders: Orders) -> dict[str, int]:
    """Orders by why they were refused or not finished."""
    told = (order.refusal for order in orders.all.values() if order.refusal)
    return dict(sorted(Counter(told).items()))
