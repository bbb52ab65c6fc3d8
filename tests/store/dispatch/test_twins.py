"""The functions decide exactly as their pure twins, and keep the same state."""

from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.dispatch import PoolRules
from core.fair_queue import QueueRules
from core.placement import PlacementRules
from core.prefix_index import PrefixRules
from core.protocol import Load
from core.shed import ShedRules
from core.tickets import (
    Dropped,
    Placed,
    Queued,
    Renew,
    ReplicaView,
)
from tests.support.dispatch_worlds import TwinPool, an_arm

pytestmark = pytest.mark.services

START_MS = 1_700_000_000_000
TICKETS = [f"t{i}" for i in range(10)]
GATEWAYS = ["gw1", "gw2"]
TENANTS = ["ten_a", "ten_b", "ten_c"]
HASHES = ["h1", "h2", "h3", "h4", "h5"]

# Small bounds, so that short histories reach them.
POOL_RULES = PoolRules(
    lease_ms=3_000,
    ack_ms=700,
    reannounce_ms=400,
    reannounce_max_ms=1_500,
    no_replica_ms=2_000,
    wait_max_ms=20_000,
    grants_max=3,
    skips_max=2,
    steps_max=6,
    sweep_max=2,
    listed_max=3,
    queue=QueueRules(
        share_standard=250, share_batch=100, credit_blocks_max=20, queue_max=3, tenants_max=2
    ),
    placement=PlacementRules(
        replica_silent_ms=2_500,
        decline_pause_ms=150,
        decline_pause_max_ms=500,
        looks_max=2,
        affinity_floor=1,
        affinity_percent=120,
        lane_slots_from=3,
        lane_percent=20,
    ),
    shed=ShedRules(batch_wait_ms=100, batch_kept=1, share_wait_ms=200, samples_min=2),
    prefix=PrefixRules(hashes_max=4, owners_max=2),
)


@pytest.fixture
def client(valkey_url):
    with redis.Redis.from_url(valkey_url) as client:
        yield client


tickets = st.sampled_from(TICKETS)
views = st.builds(
    lambda i, boot, ready, blocks, sequences: ReplicaView(
        replica=f"r{i}",
        boot_id=f"b{i}{boot}",
        url=f"http://r{i}",
        version="v",
        ready=ready,
        kv_blocks=blocks,
        sequences=sequences,
    ),
    st.integers(1, 3),
    st.sampled_from(["x", "x", "x", "x", "y"]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([8, 8, 10]),
    st.sampled_from([0, 3, 3]),
)
arms = st.fixed_dictionaries(
    {
        "ticket": tickets,
        "gateway": st.sampled_from(GATEWAYS),
        "tenant": st.sampled_from(TENANTS),
        "weight": st.sampled_from([1, 3]),
        "service_class": st.sampled_from(["interactive", "standard", "batch"]),
        "deadline_ms": st.sampled_from([0, 0, 0, 900, -1]),
        "kv_blocks": st.sampled_from([1, 2, 3, 5, 8, 11]),
        "prompt_tokens": st.sampled_from([10, 33, 100]),
        "prefix_hashes": st.integers(0, 5).map(lambda n: tuple(HASHES[:n])),
        "at_head": st.booleans(),
    }
)
excludes = st.sampled_from([(), (), ("r1",), ("r1", "r2"), "placed"])
renews = st.fixed_dictionaries(
    {
        "gateway": st.sampled_from(GATEWAYS),
        "epoch": st.sampled_from(["now", "now", "now", "other"]),
        "replicas": st.lists(views, max_size=3, unique_by=lambda v: v.replica).map(tuple),
        "acks": st.sampled_from(["all", "all", "none"]),
        "loads": st.lists(
            st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(0, 10), st.booleans()),
            max_size=2,
        ),
        "held": st.sampled_from(["none", "none", "as known", "elsewhere"]),
        "announces": st.booleans(),
        "outputs": st.lists(st.tuples(tickets, st.integers(0, 200)), max_size=3).map(tuple),
    }
)
pool_commands = st.lists(
    st.tuples(
        st.sampled_from([-3, 0, 0, 1, 50, 200, 400, 701, 1_000, 3_000]),
        st.one_of(
            st.tuples(st.just("arm"), arms, excludes),
            st.tuples(st.just("arm"), arms, excludes),
            st.tuples(st.just("renew"), renews),
            st.tuples(
                st.just("finish"),
                tickets,
                st.integers(0, 50),
                st.integers(0, 90),
                st.integers(0, 5),
            ),
            st.tuples(st.just("cancel"), tickets),
            st.tuples(st.just("lose")),
        ),
    ),
    max_size=50,
)
ALL_READY = tuple(
    ReplicaView(
        replica=f"r{i}", boot_id=f"b{i}x", url=f"http://r{i}", version="v", ready=True,
        kv_blocks=8, sequences=3,
    )
    for i in (1, 2)
)  # fmt: skip


class PoolStory:
    """Turns generated commands into calls that make sense of the pool as it stands."""

    def __init__(self, twins: TwinPool) -> None:
        self.twins, self.now_ms = twins, START_MS
        self.arms: dict[str, Any] = {}

    def open(self) -> None:
        for gateway in GATEWAYS:
            self.renew_with(gateway, replicas=ALL_READY, announces=True)
        self.now_ms += POOL_RULES.reannounce_ms

    def renew_with(self, gateway: str, **fields: Any) -> None:
        fields = {"epoch": self.twins.pure.epoch, "replicas": ()} | fields
        self.twins.renew(Renew(gateway=gateway, pool=self.twins.pool, **fields), self.now_ms)

    def arm(self, fields: dict[str, Any], exclude: Any) -> None:
        deadline_ms = fields["deadline_ms"] and self.now_ms + fields["deadline_ms"]
        if exclude == "placed":
            known = self.twins.pure.tickets.get(fields["ticket"])
            placed = known.outcome if known else None
            exclude = (placed.replica,) if isinstance(placed, Placed) else ()
        arm = an_arm(**(fields | {"deadline_ms": deadline_ms, "exclude": exclude}))
        self.arms[arm.ticket] = arm
        self.twins.arm(arm, self.now_ms)

    def renew(self, fields: dict[str, Any]) -> None:
        gateway, pure = fields["gateway"], self.twins.pure
        held: list[Any] = []
        for name, arm in self.arms.items():
            known = pure.tickets.get(name)
            outcome = known.outcome if known else None
            placed = outcome if isinstance(outcome, Placed) else None
            if fields["held"] == "as known" and known and known.gateway == gateway:
                held.append((arm, placed))
            elif fields["held"] == "elsewhere" and arm.gateway == gateway:
                held.append((arm, _placed_elsewhere(arm.ticket, self.now_ms)))
        loads = tuple(
            (
                f"r{i}",
                Load(
                    boot_id=f"b{i}x",
                    seq=seq,
                    kv_blocks_total=8,
                    kv_blocks_free=free,
                    running=0,
                    waiting=0,
                    placed_seq=self.now_ms if up_to_date else self.now_ms - 300,
                ),
            )
            for i, seq, free, up_to_date in fields["loads"]
        )
        self.renew_with(
            gateway,
            epoch=pure.epoch if fields["epoch"] == "now" else "other",
            replicas=fields["replicas"],
            loads=loads,
            acks=tuple(sorted(pure.tickets)) if fields["acks"] == "all" else (),
            held=tuple(held),
            announces=fields["announces"],
            outputs=fields["outputs"],
        )

    def tell(self, command: tuple[Any, ...]) -> None:
        match command:
            case ("arm", fields, exclude):
                self.arm(fields, exclude)
            case ("renew", fields):
                self.renew(fields)
            case ("finish", ticket, read, produced, depth):
                self.twins.finish(
                    "gw1",
                    ticket,
                    input_tokens=read,
                    output_tokens=produced,
                    prefix_hashes=tuple(HASHES[:depth]),
                    now_ms=self.now_ms,
                )
            case ("cancel", ticket):
                self.twins.cancel("gw1", ticket, self.now_ms)
            case ("lose",):
                self.twins.lose_memory()


def _placed_elsewhere(ticket: str, now_ms: int) -> Placed | None:
    if ticket > "t4":
        return None
    replica = 1 + ord(ticket[1]) % 3
    return Placed(replica=f"r{replica}", boot_id=f"b{replica}x", url="u", placement=now_ms - 100)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(history=pool_commands, warm=st.booleans())
def test_a_pool_and_its_functions_agree(client, history, warm):
    story = PoolStory(TwinPool(client, POOL_RULES))
    if warm:
        story.open()
    for step_ms, command in history:
        story.now_ms += step_ms
        story.tell(command)


def test_a_full_queue_and_its_function_agree(client):
    story = PoolStory(TwinPool(client, POOL_RULES))
    for i in range(POOL_RULES.queue.queue_max):
        story.twins.arm(an_arm(f"t{i}", gateway="gw1"), START_MS)
    assert story.twins.arm(an_arm("late", gateway="gw1"), START_MS) == Dropped(reason="queue_full")
    assert isinstance(story.twins.arm(an_arm("back", at_head=True), START_MS), Queued)


def test_the_server_s_clock_is_used_where_no_time_is_given(client):
    twins = TwinPool(client, POOL_RULES)
    arm = msgspec.msgpack.encode(an_arm("t1"))
    epoch = twins._run(twins.functions.arm, "", twins.pool, "gw", arm)[0]
    seconds, _ = client.time()
    assert abs(int(epoch.partition("-")[0]) - seconds * 1000) < 5_000
