"""The pool: placing, queueing, granting, and what happens to what nobody answers for."""

import msgspec
import pytest

from core.dispatch import Pool, PoolRules
from core.fair_queue import QueueRules
from core.placement import PlacementRules
from core.protocol import Load
from core.tickets import Arm, Dropped, Grant, Placed, Queued, Renew, ReplicaView

RULES = PoolRules(queue=QueueRules(queue_max=3), placement=PlacementRules())
PATIENT = PoolRules(lease_ms=60_000)
START_MS = 1_700_000_000_000


def a_view(name: str = "r1", **changes: object) -> ReplicaView:
    view = ReplicaView(
        replica=name,
        boot_id=f"boot_{name}",
        url="u",
        version="v",
        ready=True,
        kv_blocks=10,
        sequences=2,
    )
    return msgspec.structs.replace(view, **changes)


def an_arm(ticket: str, **changes: object) -> Arm:
    fields = {
        "ticket": ticket,
        "gateway": "gw1",
        "pool": "pool@local",
        "tenant": "ten",
        "weight": 1,
        "service_class": "standard",
        "deadline_ms": 0,
        "kv_blocks": 1,
        "prompt_tokens": 10,
    }
    return Arm(**(fields | changes))


class World:
    """A pool and its clock. `open` brings it past the start of its epoch."""

    def __init__(self, *views: ReplicaView, rules: PoolRules = RULES) -> None:
        self.pool = Pool(rules)
        self.now_ms = START_MS
        self.views = views or (a_view(),)

    def open(self, *gateways: str) -> "World":
        for gateway in gateways or ("gw1",):
            self.renew(gateway, announces=True)
        self.pass_ms(RULES.reannounce_ms)
        return self

    def pass_ms(self, duration_ms: int) -> None:
        self.now_ms += duration_ms

    def arm(self, ticket: str, **changes: object) -> Placed | Queued | Dropped:
        return self.pool.arm(an_arm(ticket, **changes), self.now_ms)

    def renew(self, gateway: str = "gw1", **changes: object):
        fields = {"epoch": self.pool.epoch, "replicas": self.views} | changes
        return self.pool.renew(Renew(gateway=gateway, pool="pool@local", **fields), self.now_ms)

    def finish(self, ticket: str, input_tokens: int = 10, output_tokens: int = 0, prefix=()):
        self.pool.finish(
            ticket,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            prefix_hashes=prefix,
            now_ms=self.now_ms,
        )

    def cancel(self, ticket: str) -> None:
        self.pool.cancel(ticket, self.now_ms)

    def account(self, replica: str = "r1") -> tuple[int, int]:
        known = self.pool.replicas[replica]
        return known.open, known.open_blocks

    def fill(self) -> None:
        for ticket in ("full1", "full2"):
            assert isinstance(self.arm(ticket), Placed)

    def granted(self, gateway: str = "gw1") -> list[str]:
        return [grant.ticket for grant in self.pool.grants_for(gateway)]


# Placing.


def test_a_ticket_goes_straight_to_a_replica_with_room():
    world = World().open()
    placed = world.arm("t1", kv_blocks=4)
    assert (placed.replica, placed.boot_id, placed.url) == ("r1", "boot_r1", "u")
    assert world.account() == (1, 4)
    world.finish("t1")
    assert world.account() == (0, 0)
    assert world.pool.tickets == {}


def test_placements_of_a_replica_are_numbered_upwards_across_epochs():
    world = World().open()
    first, second = world.arm("t1"), world.arm("t2")
    assert second.placement > first.placement
    again = World()
    again.now_ms = world.now_ms + 1
    again.open()
    assert again.arm("t3").placement > second.placement


def test_arming_the_same_ticket_again_places_it_once():
    world = World().open()
    assert world.arm("t1") == world.arm("t1")
    assert world.account() == (1, 1)


def test_a_prefix_is_remembered_where_it_was_served():
    world = World(a_view("r1"), a_view("r2")).open()
    hashes = ("a", "b")
    assert world.arm("t1", prefix_hashes=hashes).replica == "r1"
    world.finish("t1", prefix=(*hashes, "c"))
    busy = world.arm("t2", kv_blocks=2)
    assert busy.replica == "r1"
    followed = world.arm("t3", prefix_hashes=(*hashes, "c", "d"), prompt_tokens=100)
    assert (followed.replica, followed.prefix_matched) == ("r1", 3)


def test_a_cached_prefix_is_not_charged_to_the_tenant():
    world = World().open()
    world.arm("t1", prefix_hashes=("a", "b"), prompt_tokens=100)
    world.finish("t1", input_tokens=100, prefix=("a", "b"))
    assert world.pool.queue.counter("ten") == 100_000
    world.arm("t2", prefix_hashes=("a", "b", "c", "d"), prompt_tokens=200)
    assert world.pool.queue.counter("ten") == 200_000
    world.finish("t2", input_tokens=120, output_tokens=7)
    assert world.pool.queue.counter("ten") == 234_000


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_blocks": 11}, "fits_never"),
        ({"deadline_ms": START_MS}, "expired"),
    ],
)
def test_the_hopeless_are_dropped_at_once(changes, reason):
    world = World().open()
    assert world.arm("t1", **changes) == Dropped(reason=reason)
    assert world.pool.tickets == {}


def test_a_pool_without_replicas_keeps_its_queue_only_so_long():
    world = World(rules=PATIENT)
    world.views = ()
    world.open()
    assert isinstance(world.arm("t1"), Queued)
    world.pass_ms(RULES.no_replica_ms)
    assert world.arm("t2") == Dropped(reason="no_replica")
    assert world.renew().grants == (Grant(ticket="t1", outcome=Dropped(reason="no_replica")),)


def test_a_replica_in_nobody_s_view_is_gone_when_its_tickets_are():
    world = World(rules=PATIENT).open()
    world.arm("t1")
    world.views = ()
    world.pass_ms(RULES.placement.replica_silent_ms + 1)
    world.renew(announces=True)
    assert isinstance(world.arm("t2"), Queued), "it takes no more"
    world.finish("t1")
    assert "r1" in world.pool.replicas
    world.renew()
    assert world.pool.replicas == {}
    emptied_ms = world.pool.fleet.empty_since_ms
    world.pass_ms(10)
    world.renew()
    assert world.pool.fleet.empty_since_ms == emptied_ms == world.now_ms - 10


# Queueing.


def test_a_full_pool_queues_and_the_next_to_finish_makes_room():
    world = World().open()
    world.fill()
    assert world.arm("t1") == Queued(position=1, expected_wait_ms=0)
    assert world.arm("t1") == Queued(position=1, expected_wait_ms=0)
    assert world.arm("t2").position == 2
    world.finish("full1")
    assert world.granted() == ["t1"]


def test_the_expected_wait_is_by_how_long_tickets_stay():
    world = World().open()
    for i in range(3):
        world.arm(f"done{i}")
        world.pass_ms(400)
        world.finish(f"done{i}")
    world.fill()
    assert world.arm("t1").expected_wait_ms == 400 // 2, "two places, each free every 400 ms"
    assert world.arm("t2").expected_wait_ms == 400
    world.cancel("full1")
    assert world.granted() == ["t1"]
    assert world.renew().congestion_ms == 200


def test_a_full_queue_takes_nobody_but_who_comes_back():
    world = World().open()
    world.fill()
    for i in range(RULES.queue.queue_max):
        world.arm(f"t{i}")
    assert world.arm("late") == Dropped(reason="queue_full")
    assert isinstance(world.arm("late", service_class="batch"), Queued)
    assert isinstance(world.arm("back", at_head=True), Queued)
    world.finish("full1")
    assert world.granted() == ["back"]


def test_a_head_past_its_deadline_is_dropped_and_the_next_one_served():
    world = World().open()
    world.fill()
    world.arm("late", deadline_ms=world.now_ms + 100)
    world.arm("t2")
    world.pass_ms(100)
    world.finish("full1")
    grants = world.pool.grants_for("gw1")
    assert grants[0] == Grant(ticket="late", outcome=Dropped(reason="expired"))
    assert isinstance(grants[1].outcome, Placed)


def test_a_ticket_that_hears_of_its_own_deadline_is_forgotten():
    world = World().open()
    world.fill()
    world.arm("t1", deadline_ms=world.now_ms + 100)
    world.pass_ms(100)
    assert world.arm("t1") == Dropped(reason="expired")
    assert "t1" not in world.pool.tickets


def test_without_a_deadline_a_wait_is_bounded_all_the_same():
    world = World().open()
    world.fill()
    world.arm("t1")
    for _ in range(RULES.wait_max_ms // 2_000):
        world.pass_ms(2_000)
        grants = world.renew().grants
    assert grants == (Grant(ticket="t1", outcome=Dropped(reason="expired")),)


def test_a_queued_ticket_that_will_never_fit_again_is_dropped():
    world = World().open()
    world.fill()
    world.arm("t1", kv_blocks=9)
    world.views = (a_view(kv_blocks=5),)
    assert world.renew().grants[0].outcome == Dropped(reason="fits_never")


def test_a_cancelled_ticket_leaves_from_wherever_it_is():
    world = World().open("gw1")
    world.fill()
    before = world.pool.queue.counter("ten")
    world.arm("t1")
    world.cancel("t1")
    world.cancel("t1")
    world.arm("t2")
    world.finish("full1")
    assert world.granted() == ["t2"]
    world.cancel("t2")
    world.cancel("full2")
    assert world.account() == (0, 0)
    assert world.pool.tickets == {}
    assert world.pool.queue.counter("ten") == before - 10_000
    assert not world.pool.book.unacked


def test_a_queued_ticket_that_finishes_is_simply_gone():
    world = World().open()
    world.fill()
    world.arm("t1")
    world.finish("t1")
    assert len(world.pool.queue) == 0


# The head that does not fit.


def test_others_pass_a_head_that_fits_nowhere_but_not_on_the_replica_kept_for_it():
    views = (a_view("r1", sequences=0), a_view("r2", sequences=0))
    world = World(*views).open()
    for i in range(8):
        world.arm(f"run{i}", kv_blocks=2)
    assert isinstance(world.arm("big", kv_blocks=10, tenant="ten_a"), Queued)
    for i in range(2):
        assert isinstance(world.arm(f"small{i}", kv_blocks=1, tenant="ten_b"), Placed)
    held = {name: world.account(name)[1] for name in ("r1", "r2")}
    assert sorted(held.values()) == [8, 10], "one is kept from filling up"
    assert isinstance(world.arm("small2", kv_blocks=1, tenant="ten_b"), Queued)
    kept = min(held, key=held.get)
    for i in range(8):
        if world.pool.tickets[f"run{i}"].outcome.replica == kept:
            world.finish(f"run{i}")
    assert "big" in world.granted()


def test_a_stream_of_small_tickets_does_not_starve_a_large_one():
    world = World(a_view("r1", sequences=0, kv_blocks=20), rules=PoolRules()).open()
    running = []
    for i in range(20):
        world.arm(f"first{i}", tenant="small")
        running.append(f"first{i}")
    world.arm("big", kv_blocks=15, tenant="big")
    for i in range(300):
        world.pass_ms(10)
        world.arm(f"s{i}", tenant="small")
        world.finish(running.pop(0))
        for grant in world.renew(acks=tuple(world.granted())).confirmed:
            if grant.ticket == "big":
                assert i <= 20
                return
            running.append(grant.ticket)
    pytest.fail("the large ticket starved")


def test_only_so_many_heads_are_passed_over_in_one_call():
    rules = PoolRules(skips_max=1, queue=QueueRules(queue_max=50))
    views = (a_view("r1"), a_view("r2"), a_view("r3", kv_blocks=3, sequences=9))
    world = World(*views, rules=rules).open()
    for i in range(2):
        world.arm(f"run{i}", kv_blocks=9)
    for i, tenant in enumerate(("a", "b", "c")):
        world.arm(f"big{i}", kv_blocks=10, tenant=tenant)
    assert isinstance(world.arm("small", tenant="d"), Queued)
    world.cancel("big0")
    assert world.granted() == [], "two more heads were tried before"
    world.cancel("big1")
    assert world.granted() == ["small"]


def test_only_so_many_tickets_are_placed_in_one_call():
    rules = PoolRules(grants_max=2)
    world = World(rules=rules)
    for i in range(5):
        world.arm(f"t{i}")
    world.views = (a_view(sequences=0),)
    world.open()
    assert len(world.renew().grants) == 2
    assert len(world.renew().grants) == 4
    assert len(world.renew().grants) == 5


def test_only_so_many_heads_are_looked_at_in_one_call():
    rules = PoolRules(steps_max=3)
    world = World(rules=rules)
    for i in range(5):
        world.arm(f"t{i}", deadline_ms=START_MS + 10)
    world.open()
    assert len(world.renew().grants) == 3
    assert len(world.renew().grants) == 5


# Grants.


def test_a_grant_repeats_until_it_is_acknowledged_and_then_stands():
    world = World().open()
    world.fill()
    world.arm("t1")
    world.finish("full1")
    first = world.renew().grants
    assert world.renew().grants == first
    renewed = world.renew(acks=("t1", "unknown", "full2"))
    assert renewed.grants == ()
    assert renewed.confirmed[0] == first[0]
    assert [grant.ticket for grant in renewed.confirmed] == ["t1", "full2"]
    world.pass_ms(RULES.ack_ms)
    world.renew()
    assert world.account() == (2, 2)


def test_another_gateway_cannot_acknowledge_it_nor_one_that_still_waits():
    world = World().open("gw1", "gw2")
    world.fill()
    world.arm("t1")
    world.arm("t2")
    world.finish("full1")
    assert world.renew("gw2", acks=("t1",)).confirmed == ()
    assert world.renew("gw1", acks=("t2",)).confirmed == ()
    assert world.granted() == ["t1"]


def test_an_unacknowledged_grant_returns_to_the_head_and_undoes_its_placement():
    world = World(a_view(sequences=1)).open("gw1", "gw2")
    world.arm("running")
    world.arm("t1", tenant="a")
    world.arm("t2", tenant="a", gateway="gw2")
    world.finish("running")
    assert world.granted("gw1") == ["t1"]
    assert world.account() == (1, 1)
    counter = world.pool.queue.counter("a")
    world.pass_ms(RULES.ack_ms)
    world.views = (a_view(sequences=1, ready=False),)
    assert world.renew("gw2").grants == ()
    assert world.account() == (0, 0)
    assert world.pool.queue.counter("a") == counter - 10_000
    late = world.renew("gw1", acks=("t1",))
    assert late.confirmed == ()
    world.views = (a_view(sequences=1),)
    assert [grant.ticket for grant in world.renew("gw1").grants] == ["t1"], "still first"


def test_arming_a_granted_ticket_acknowledges_it():
    world = World().open()
    world.fill()
    world.arm("t1")
    world.finish("full1")
    placed = world.arm("t1")
    assert isinstance(placed, Placed)
    assert world.granted() == []
    world.pass_ms(RULES.ack_ms)
    world.renew()
    assert world.account() == (2, 2)


def test_a_drop_is_told_until_it_is_acknowledged():
    world = World().open()
    world.fill()
    world.arm("t1", deadline_ms=world.now_ms + 10)
    world.pass_ms(RULES.ack_ms + 10)
    dropped = Grant(ticket="t1", outcome=Dropped(reason="expired"))
    assert world.renew().grants == (dropped,)
    world.pass_ms(RULES.ack_ms)
    assert world.renew(acks=("t1",)).confirmed == (dropped,)
    assert "t1" not in world.pool.tickets


def test_arming_a_dropped_ticket_tells_it_too():
    world = World().open()
    world.fill()
    world.arm("t1", deadline_ms=world.now_ms + 10)
    world.pass_ms(10)
    world.renew()
    assert world.arm("t1") == Dropped(reason="expired")
    assert world.granted() == []


def test_only_so_many_grants_are_told_at_once():
    world = World(rules=PoolRules(listed_max=2))
    for i in range(4):
        world.arm(f"t{i}")
    world.views = (a_view(sequences=0),)
    world.open()
    assert [grant.ticket for grant in world.renew().grants] == ["t0", "t1"]
    assert [g.ticket for g in world.renew(acks=("t0", "t1")).grants] == ["t2", "t3"]


# Coming back.


def test_a_declined_ticket_goes_elsewhere_and_first():
    world = World(a_view("r1"), a_view("r2", ready=False)).open()
    world.fill()
    world.arm("waiting")
    world.arm("full1", exclude=("r1",))
    assert world.account() == (1, 1)
    assert world.pool.queue.head(()).ticket == "full1"
    world.views = (a_view("r1"), a_view("r2"))
    grants = {grant.ticket: grant.outcome.replica for grant in world.renew().grants}
    assert grants["full1"] == "r2"


def test_a_replica_that_declined_pauses_for_everyone():
    world = World().open()
    world.arm("t1")
    assert isinstance(world.arm("t1", exclude=("r1",)), Queued)
    assert isinstance(world.arm("t2"), Queued)
    world.pass_ms(RULES.placement.decline_pause_ms)
    assert [grant.ticket for grant in world.renew().grants] == ["t1", "t2"]


def test_a_ticket_from_a_replica_s_former_life_pauses_nothing():
    world = World().open()
    world.arm("t1")
    world.views = (a_view(boot_id="boot_2"),)
    world.renew()
    assert world.account() == (0, 0)
    placed = world.arm("t1", exclude=("r1",))
    assert placed.boot_id == "boot_2"
    world.finish("t1")
    assert world.account() == (0, 0)


def test_a_hopeless_return_is_dropped():
    world = World().open()
    world.arm("t1")
    late = world.arm("t1", exclude=("r1",), deadline_ms=world.now_ms)
    assert late == Dropped(reason="expired")
    assert world.pool.tickets == {}


# Reports, output.


def test_reports_correct_the_account_of_a_replica_that_is_known():
    world = World().open()
    placed = world.arm("t1")
    report = Load(
        boot_id="boot_r1",
        seq=1,
        kv_blocks_total=10,
        kv_blocks_free=2,
        running=1,
        waiting=0,
        placed_seq=placed.placement,
    )
    world.renew(loads=(("r1", report), ("unknown", report)))
    assert isinstance(world.arm("t2", kv_blocks=3), Queued)


def test_output_is_charged_to_the_counter_as_it_is_told():
    world = World().open()
    world.fill()
    world.arm("waiting", tenant="other")
    other = world.pool.queue.counter("other")
    told = (("full1", 5), ("full1", 5), ("full1", 3), ("waiting", 9), ("unknown", 9))
    world.renew(outputs=told)
    assert world.pool.queue.counter("ten") == 20_000 + 10_000
    assert world.pool.queue.counter("other") == other


# Gateways and epochs.


def test_a_silent_gateway_s_tickets_are_let_go():
    world = World(rules=PoolRules(sweep_max=1)).open("gw1", "gw2")
    world.fill()
    world.arm("t1")
    for _ in range(2):
        world.pass_ms(RULES.lease_ms // 2)
        world.renew("gw2")
    for left in (1, 0):
        world.renew("gw2")
        assert len(world.pool.tickets) == left
    assert world.account() == (0, 0)
    assert world.pool.book.owned == {}
    assert [gateway for _, gateway in world.pool.attendance.gateways] == ["gw2"]


def test_a_gateway_that_was_given_up_is_asked_to_announce_and_does():
    world = World().open("gw1", "gw2")
    placed = world.arm("t1")
    for _ in range(2):
        world.pass_ms(RULES.lease_ms // 2)
        world.renew("gw2")
    assert world.pool.tickets == {}
    assert world.renew("gw1").reannounce
    assert world.renew("gw1").reannounce, "until it does"
    renewed = world.renew("gw1", held=((an_arm("t1"), placed),), announces=True)
    assert not renewed.reannounce
    assert not world.renew("gw1").reannounce
    assert world.account() == (1, 1)


def test_a_gateway_that_comes_back_while_its_tickets_are_let_go_is_asked_too():
    world = World(rules=PoolRules(sweep_max=1)).open("gw1")
    world.fill()
    world.pass_ms(RULES.lease_ms)
    assert world.renew("gw1").reannounce
    assert len(world.pool.tickets) == 1


def test_a_gateway_that_only_armed_is_asked_too():
    world = World().open("gw1")
    world.arm("t1", gateway="gw2")
    assert world.renew("gw2").reannounce


def test_nothing_is_placed_before_a_new_epoch_knows_what_runs():
    world = World()
    assert isinstance(world.arm("t1"), Queued)
    assert world.renew(announces=True).grants == ()
    world.pass_ms(RULES.reannounce_ms - 1)
    assert world.renew().grants == ()
    world.pass_ms(1)
    assert [grant.ticket for grant in world.renew().grants] == ["t1"]


def test_the_wait_is_longer_while_a_gateway_owes_its_tickets_but_bounded():
    world = World().open("gw1")
    assert world.renew("gw2", epoch="lost").reannounce
    assert isinstance(world.arm("t1"), Queued)
    world.pass_ms(RULES.reannounce_max_ms - RULES.reannounce_ms)
    assert [grant.ticket for grant in world.renew().grants] == ["t1"]


def test_a_finish_or_cancel_creates_no_epoch():
    world = World()
    world.finish("t1")
    world.cancel("t1")
    assert world.pool.epoch == ""
    assert world.pool.grants_for("gw1") == ()


def test_announced_tickets_are_accounted_where_they_are():
    before = World(a_view("r1"), a_view("r2")).open()
    placed = before.arm("t1", kv_blocks=3)
    world = World(a_view("r1"))
    gone = Placed(replica="r9", boot_id="b", url="u", placement=1)
    old_life = Placed(replica="r1", boot_id="boot_0", url="u", placement=1)
    held = (
        (an_arm("t1", kv_blocks=3), placed),
        (an_arm("t2"), gone),
        (an_arm("t3"), old_life),
        (an_arm("t4"), None),
    )
    world.renew(held=held, announces=True)
    assert world.account() == (1, 3)
    assert len(world.pool.queue) == 1
    for ticket in ("t1", "t2", "t3", "t4"):
        world.finish(ticket)
    assert world.account() == (0, 0)
    assert world.pool.tickets == {}


def test_an_announcement_of_what_is_known_changes_only_the_name():
    world = World(a_view(sequences=1)).open("gw1")
    placed = world.arm("t1")
    world.arm("t2")
    world.arm("t3")
    counter = world.pool.queue.counter("ten")
    held = ((an_arm("t3"), None), (an_arm("t1"), placed), (an_arm("t2"), None))
    world.renew("gw1~2", held=held, announces=True)
    assert world.pool.book.owned == {"gw1~2": {"t1", "t2", "t3"}}
    assert world.pool.queue.counter("ten") == counter
    assert world.account() == (1, 1)
    world.finish("t1")
    assert world.granted("gw1~2") == ["t2"], "the queue keeps its order"


def test_an_announced_grant_needs_no_acknowledgement():
    world = World(a_view(sequences=1)).open("gw1")
    world.arm("running")
    world.arm("t1")
    world.finish("running")
    grant = world.renew().grants[0]
    world.renew("gw1~2", held=((an_arm("t1"), grant.outcome),), announces=True)
    world.pass_ms(RULES.ack_ms)
    world.renew("gw1~2")
    assert world.account() == (1, 1)
    assert world.granted("gw1") == world.granted("gw1~2") == []


def test_a_gateway_knows_better_where_its_tickets_are():
    world = World(a_view("r1"), a_view("r2")).open()
    here = world.arm("t1", kv_blocks=2)
    assert here.replica == "r1"
    there = msgspec.structs.replace(here, replica="r2", boot_id="boot_r2")
    world.renew(held=((an_arm("t1", kv_blocks=2), there),), announces=True)
    assert (world.account("r1"), world.account("r2")) == ((0, 0), (1, 2))
    world.renew(held=((an_arm("t1", kv_blocks=2), None),), announces=True)
    assert [grant.ticket for grant in world.pool.grants_for("gw1")] == ["t1"]


def test_the_clock_never_goes_back():
    world = World().open()
    world.renew()
    world.pass_ms(-5_000)
    world.renew()
    assert world.pool.now_ms == world.now_ms + 5_000
