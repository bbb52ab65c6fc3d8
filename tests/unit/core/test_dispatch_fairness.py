"""Whom a pool serves over time: tenants by weight, classes by rank and share, nobody never.

`SOAK_FAIRNESS` is how many random histories the bound is tried on; 30 by default.
"""

import os
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.dispatch import Pool, PoolRules
from core.fair_queue import QueueRules
from core.placement import PlacementRules
from core.tickets import Arm, Placed, Renew, ReplicaView

SLOTS = 8
INPUT_TOKENS_MAX, OUTPUT_TOKENS_MAX = 50, 20
STEP_MS = 20
# Sheng et al. 2024, theorem 4.4: twice the larger of one input and what a full batch holds.
VTC_BOUND = 2 * max(INPUT_TOKENS_MAX, 2 * SLOTS * OUTPUT_TOKENS_MAX)


class Service:
    """One replica that produces a token a step for each ticket, and tenants that keep asking."""

    def __init__(self, rules: PoolRules, seed: int) -> None:
        self.pool, self.dice = Pool(rules), random.Random(seed)
        self.now_ms = 1_700_000_000_000
        self.armed = 0
        self.tickets: dict[str, Arm] = {}
        self.left: dict[str, int] = {}  # output tokens of each running ticket
        self.produced: Counter[str] = Counter()
        self.served: Counter[str] = Counter()  # by tenant, in input tokens
        self.blocks: Counter[str] = Counter()  # by class
        self.renew()
        self.now_ms += rules.reannounce_ms

    def ask(self, tenant: str, *, weight: int = 1, service_class: str = "standard") -> None:
        self.armed += 1
        arm = Arm(
            ticket=f"t{self.armed:06}",
            gateway="gw",
            pool="p",
            tenant=tenant,
            weight=weight,
            service_class=service_class,
            deadline_ms=0,
            kv_blocks=self.dice.randint(1, 4),
            prompt_tokens=self.dice.randint(1, INPUT_TOKENS_MAX),
        )
        self.tickets[arm.ticket] = arm
        if isinstance(self.pool.arm(arm, self.now_ms), Placed):
            self.run(arm)

    def run(self, arm: Arm) -> None:
        self.left[arm.ticket] = self.dice.randint(1, OUTPUT_TOKENS_MAX)
        self.served[arm.tenant] += arm.prompt_tokens
        self.blocks[arm.service_class] += arm.kv_blocks

    def renew(self) -> None:
        view = ReplicaView(
            replica="r1", boot_id="b", url="u", version="v", ready=True, kv_blocks=1_000,
            sequences=SLOTS,
        )  # fmt: skip
        renewed = self.pool.renew(
            Renew(
                gateway="gw",
                pool="p",
                epoch=self.pool.epoch,
                replicas=(view,),
                announces=not self.pool.epoch,
                acks=tuple(grant.ticket for grant in self.pool.grants_for("gw")),
                outputs=tuple((name, self.produced[name]) for name in self.left),
            ),
            self.now_ms,
        )
        for grant in renewed.confirmed:
            self.run(self.tickets[grant.ticket])

    def step(self) -> None:
        self.now_ms += STEP_MS
        for name in list(self.left):
            arm = self.tickets[name]
            self.produced[name] += 1
            self.served[arm.tenant] += 2
            self.left[name] -= 1
            if self.left[name] == 0:
                del self.left[name]
                self.pool.finish(
                    name,
                    input_tokens=arm.prompt_tokens,
                    output_tokens=self.produced[name],
                    prefix_hashes=(),
                    now_ms=self.now_ms,
                )
        self.renew()
        self.renew()

    def waiting(self, tenant: str, service_class: str = "standard") -> int:
        return len(self.pool.queue.tickets.get((service_class, tenant), ()))


@settings(max_examples=int(os.environ.get("SOAK_FAIRNESS", "30")))
@given(seed=st.integers(0, 10**6), weights=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_backlogged_tenants_are_served_by_weight_within_the_bound(seed, weights):
    # Without a lane, which takes a slot of these eight out of the paper's one batch.
    service = Service(PoolRules(placement=PlacementRules(lane_slots_from=SLOTS + 1)), seed)
    start: Counter[str] | None = None
    for _ in range(150):
        for tenant, weight in zip("ab", weights, strict=True):
            while service.waiting(tenant) < 5:
                service.ask(tenant, weight=weight)
        start = start or Counter(service.served)
        service.step()
        got = [(service.served[t] - start[t]) / w for t, w in zip("ab", weights, strict=True)]
        assert abs(got[0] - got[1]) <= VTC_BOUND
    assert len(service.left) == SLOTS, "no slot is left empty while tickets wait"


@pytest.mark.parametrize("seed", range(3))
def test_a_flood_does_not_delay_a_tenant_that_asks_now_and_then(seed):
    service = Service(PoolRules(), seed)
    for _ in range(300):
        service.ask("flood")
    waits = []
    for turn in range(120):
        if turn % 10 == 0:
            service.ask("small")
            asked = turn
        service.step()
        if service.waiting("small") == 0 and asked is not None:
            waits.append(turn - asked)
            asked = None
    assert len(waits) == 12
    # A slot frees about every other step; being next, it takes the first or the second.
    assert sum(waits) / len(waits) <= 6
    assert max(waits) <= OUTPUT_TOKENS_MAX


@pytest.mark.parametrize("share", [10, 50, 200])
def test_a_lower_class_keeps_its_share_under_a_flood_of_a_higher_one(share):
    service = Service(PoolRules(queue=QueueRules(share_batch=share)), seed=1)
    for _ in range(2_000):
        while service.waiting("a", "interactive") < 5:
            service.ask("a", service_class="interactive")
        while service.waiting("b", "batch") < 5:
            service.ask("b", service_class="batch")
        service.step()
    got = service.blocks["batch"] / service.blocks["interactive"]
    assert share / 1_000 * 0.9 <= got <= share / 1_000 * 1.3
