"""What a tenant asks for, and all that is known to have become of it.

An order is the truth: what the engine really produced, what the client really got. Decision
modules never see it; the invariants compare their books with it.
"""

import msgspec

from core.money import EndCause
from core.protocol import Sampling, ServiceClass
from core.tickets import Limits
from simulator.model import sequential, text_of


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant, and how it behaves."""

    tenant: str
    salt: bytes
    limits: Limits
    weight: int
    hard_cap_micro: int | None
    gap_ms: int  # mean between its orders
    service_class: ServiceClass


class Attempt(msgspec.Struct):
    """What one worker did for one attempt."""

    replica: str
    resumed: dict[int, int]  # ids by choice, from earlier attempts
    produced: dict[int, int]  # the same, in this one
    journal_survived: bool = True


class Order(msgspec.Struct, kw_only=True, eq=False):
    """One request, for ever. `expected` is what the sequential model answers, by choice."""

    request_id: str
    profile: Profile
    prompt: tuple[int, ...]
    sampling: Sampling
    choices: int
    deadline_ms: int
    patience_ms: int  # until its client leaves; 0 is for ever
    arrived_ms: int
    expected: list[list[int]]
    expected_text: list[str]
    attempts: dict[int, Attempt] = msgspec.field(default_factory=dict)
    got: list[list[int]] = msgspec.field(default_factory=list)  # ids passed on, by choice
    got_text: list[str] = msgspec.field(default_factory=list)
    delivered: int = 0  # tokens written to a client that was still there
    client_left: bool = False
    gateway_died: bool = False
    cause: EndCause | None = None  # as its gateway decided
    refusal: str = ""  # why it was not accepted, or not finished
    ended_ms: int = 0
    armed_ms: int = 0  # when it first asked for a replica
    placed_ms: int = 0  # when it first got one

    @property
    def over(self) -> bool:
        """Whether its client waits for nothing any more."""
        return self.cause is not None or self.gateway_died

    @property
    def produced(self) -> int:
        """Tokens that engines made for it."""
        return sum(sum(attempt.produced.values()) for attempt in self.attempts.values())

    @property
    def journal_survived(self) -> bool:
        """Whether no record of any attempt was lost."""
        return all(attempt.journal_survived for attempt in self.attempts.values())


def an_order(
    request_id: str,
    profile: Profile,
    prompt: tuple[int, ...],
    sampling: Sampling,
    *,
    choices: int,
    context_tokens: int,
    deadline_ms: int,
    patience_ms: int,
    arrived_ms: int,
) -> Order:
    """An order with the answer it has to get."""
    expected = [
        sequential(profile.salt, prompt, sampling, choice, context_tokens)
        for choice in range(choices)
    ]
    return Order(
        request_id=request_id,
        profile=profile,
        prompt=prompt,
        sampling=sampling,
        choices=choices,
        deadline_ms=deadline_ms,
        patience_ms=patience_ms,
        arrived_ms=arrived_ms,
        expected=expected,
        expected_text=[text_of(ids, sampling.stop) for ids in expected],
        got=[[] for _ in range(choices)],
        got_text=["" for _ in range(choices)],
    )


class Orders:
    """All of them, by request id."""

    def __init__(self) -> None:
        self.all: dict[str, Order] = {}
        self.open: dict[str, Order] = {}

    def add(self, order: Order) -> None:
        """A new one."""
        self.all[order.request_id] = self.open[order.request_id] = order

    def end(self, order: Order, cause: EndCause, refusal: str, now_ms: int) -> None:
        """Its gateway decided how it ended."""
        assert order.cause is None, "an order ends once"
        order.cause, order.refusal, order.ended_ms = cause, refusal, now_ms
        self.open.pop(order.request_id, None)

    def orphan(self, order: Order, now_ms: int) -> None:
        """Its gateway died."""
        if not order.over:
            order.gateway_died, order.ended_ms = True, now_ms
            self.open.pop(order.request_id, None)
