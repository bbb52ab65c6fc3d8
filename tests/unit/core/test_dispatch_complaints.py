"""Faults that users of other dispatchers reported, tried on ours: each named by its symptom."""

from collections import Counter

import msgspec
import pytest

from core.dispatch import Pool, PoolRules
from core.protocol import Load
from core.shed import ShedRules
from core.tickets import Arm, Dropped, Placed, Queued, Renew, ReplicaView

START_MS = 1_700_000_000_000
PATIENT = PoolRules(lease_ms=600_000)


class Site:
    """A pool of workers that is open, and a clock."""

    def __init__(self, count: int, rules: PoolRules = PATIENT, **capacity: int) -> None:
        self.pool, self.now_ms = Pool(rules), START_MS
        sizes = {"kv_blocks": 10_000, "sequences": 256} | capacity
        self.views = [
            ReplicaView(replica=f"w{i}", boot_id=f"b{i}", url="u", version="v", ready=True, **sizes)
            for i in range(count)
        ]
        self.renew(announces=True)
        self.now_ms += rules.reannounce_ms

    def renew(self, **fields: object):
        return self.pool.renew(
            Renew(
                gateway="gw", pool="p", epoch=self.pool.epoch, replicas=tuple(self.views), **fields
            ),
            self.now_ms,
        )

    def arm(self, ticket: str, **changes: object) -> Placed | Queued | Dropped:
        fields = {
            "gateway": "gw",
            "pool": "p",
            "tenant": "ten",
            "weight": 1,
            "service_class": "standard",
            "deadline_ms": 0,
            "kv_blocks": 8,
            "prompt_tokens": 128,
        }
        return self.pool.arm(Arm(ticket=ticket, **(fields | changes)), self.now_ms)

    def finish(self, ticket: str, hashes: tuple[str, ...] = ()) -> None:
        self.pool.finish(
            ticket, input_tokens=8, output_tokens=8, prefix_hashes=hashes, now_ms=self.now_ms
        )

    def serve(self, ticket: str, stay_ms: int) -> None:
        assert isinstance(self.arm(ticket), Placed)
        self.now_ms += stay_ms
        self.finish(ticket)

    def report(self, name: str, **changes: int) -> None:
        load = Load(
            boot_id=f"b{name[1:]}",
            seq=1,
            kv_blocks_total=10_000,
            kv_blocks_free=10_000,
            running=0,
            waiting=0,
            placed_seq=0,
        )
        self.renew(loads=((name, msgspec.structs.replace(load, **changes)),))

    def open(self) -> list[int]:
        return [replica.open for replica in self.pool.replicas.values()]

    def shares(self, count: int, **changes: object) -> Counter[str]:
        placed = [self.arm(f"t{i}", **changes) for i in range(count)]
        return Counter(answer.replica for answer in placed)


# sglang P14305: a cache miss goes to the smallest tree, whatever runs there.
def test_a_cold_prompt_does_not_go_to_a_busy_worker_with_an_empty_cache():
    site = Site(2)
    for i in range(40):  # the idle one is full of prefixes
        hashes = (f"h{i}",)
        answer = site.arm(f"warm{i}", prefix_hashes=hashes)
        site.finish(f"warm{i}", hashes if answer.replica == "w1" else ())
    site.pool.prefixes.record([f"g{i}" for i in range(500)], site.pool.replicas["w1"].number)
    running = 0
    while running < 8:
        answer = site.arm(f"long{running}", kv_blocks=800, exclude=("w1",))
        assert answer.replica == "w0"
        running += 1
    shares = site.shares(50, prefix_hashes=("cold",))
    assert shares["w1"] > 40


# sglang P27547: load is counted only when the response starts, so long prompts all go to one.
def test_long_prompts_with_one_token_of_output_are_spread_while_none_has_started():
    shares = Site(3, kv_blocks=100_000).shares(50, kv_blocks=501, prompt_tokens=8_000)
    assert all(abs(count - 50 / 3) <= 0.3 * 50 / 3 for count in shares.values())


# AIBrix #2421: a pod recreated under the same name gets the decrement of its former life.
def test_a_worker_restarted_under_its_id_never_counts_below_nothing():
    site = Site(2)
    answer = site.arm("t1")
    index = int(answer.replica[1:])
    site.views[index] = msgspec.structs.replace(site.views[index], boot_id="again")
    site.renew()
    site.finish("t1")
    for replica in site.pool.replicas.values():
        assert (replica.open, replica.open_blocks, replica.unreported_blocks) == (0, 0, 0)
    assert site.pool.fleet.open == 0
    assert site.pool.open_by_tenant == {}


# AIBrix #2422: a gap between choosing and counting, so a burst picks one pod.
def test_a_burst_in_one_turn_is_counted_as_it_is_placed():
    assert max(Site(4).shares(100).values()) <= 35


# llm-d-router #298, P2066: decisions from metrics 50 ms old let bursts pile up and overshoot.
def test_waves_are_spread_from_our_own_counts_while_metrics_are_frozen():
    site = Site(4, sequences=200)
    placed = [site.arm(f"t{i}") for i in range(800)]
    shares = Counter(answer.replica for answer in placed if isinstance(answer, Placed))
    assert set(shares.values()) == {199}, "all but each worker's lane"
    assert site.open() == [199] * 4, "and nothing overshoots"


# llm-d-router #2100, #2408: metrics gone stale read as saturated, and all dispatch halts.
def test_a_worker_whose_reports_stop_is_still_sent_to():
    site = Site(1)
    site.report("w0", kv_blocks_free=0, waiting=500)
    for i in range(20):
        site.now_ms += 1_000  # its reports stay away; the registry still has it
        site.renew()
        site.serve(f"t{i}", stay_ms=10)


# sglang P39464: an engine's own "queue full" keeps it shed long after it is idle.
def test_a_worker_that_declined_is_tried_again_within_a_second():
    site = Site(1)
    placed = site.arm("t1")
    again = site.arm("t1", exclude=(placed.replica,), at_head=True)
    assert isinstance(again, Queued)
    site.now_ms += site.pool.rules.placement.decline_pause_ms
    site.renew()
    assert [grant.ticket for grant in site.pool.grants_for("gw")] == ["t1"]


def test_a_worker_that_declines_again_and_again_is_asked_less_and_less():
    site = Site(1)
    rules = site.pool.rules.placement
    replica = site.pool.replicas["w0"]
    pauses = []
    for _ in range(8):
        site.pool.fleet.pause(replica, site.now_ms)
        pauses.append(replica.paused_until_ms - site.now_ms)
        site.now_ms = replica.paused_until_ms
    assert pauses[:4] == [rules.decline_pause_ms << turn for turn in range(4)]
    assert pauses[-1] == rules.decline_pause_max_ms
    site.now_ms += rules.decline_pause_max_ms
    site.pool.fleet.pause(replica, site.now_ms)
    assert replica.paused_until_ms - site.now_ms == rules.decline_pause_ms


# dynamo P9688: busy limits decide only whether all are busy, and load goes on to the full ones.
def test_when_three_of_four_are_full_all_goes_to_the_fourth():
    site = Site(4, sequences=7)
    for i in range(3):
        others = tuple(f"w{other}" for other in range(4) if other != i)
        for n in range(7):
            assert site.arm(f"full{i}.{n}", exclude=others, tenant=f"t{i}").replica == f"w{i}"
    assert site.shares(7, prefix_hashes=("hot",)) == {"w3": 7}


# production-stack #915: one round-robin counter for all models skews each of two.
def test_each_pool_spreads_by_its_own_counts():
    one, other = Site(2), Site(2)
    turns = [(one.arm(f"a{i}"), other.arm(f"b{i}")) for i in range(100)]
    for side in (0, 1):
        assert set(Counter(turn[side].replica for turn in turns).values()) == {50}


# dynamo P12138, P14210: a burst trips an overload mark that nothing clears.
def test_an_idle_pool_refuses_nobody_however_it_was_overloaded():
    rules = PoolRules(lease_ms=600_000, shed=ShedRules(samples_min=1))
    site = Site(1, rules, sequences=4)
    site.serve("measured", stay_ms=2_000)
    burst = [site.arm(f"t{i}", deadline_ms=site.now_ms + 5_000) for i in range(128)]
    assert Dropped in map(type, burst)
    for name in list(site.pool.tickets):
        site.pool.cancel(name, site.now_ms)
    for i in range(24):
        assert isinstance(site.arm(f"probe{i}", deadline_ms=site.now_ms + 100), Placed)
        site.finish(f"probe{i}")


# llm-d-router #1735: zero endpoints are told as the caller's fault.
def test_a_pool_scaled_to_zero_says_so_and_not_that_its_queue_is_full():
    site = Site(0)
    site.now_ms += site.pool.rules.no_replica_ms
    assert site.arm("t1") == Dropped(reason="no_replica")


# GAIE #1861: low-priority batch starves for ever under strict priority.
@pytest.mark.parametrize("tenants", [1, 500])
def test_batch_gets_its_share_of_a_pool_that_interactive_requests_saturate(tenants):
    site = Site(1, sequences=8)
    asked, running, served = 0, ["b0"], 0
    site.arm("b0", service_class="batch", tenant="b")
    for turn in range(1_500):
        site.now_ms += 1
        while site.pool.queue.counts["interactive"] < 5:
            asked += 1
            answer = site.arm(
                f"i{asked}", service_class="interactive", tenant=f"i{asked % tenants}"
            )
            if isinstance(answer, Placed):
                running.append(f"i{asked}")
        if running:
            site.finish(running.pop(0))
        confirmed = site.renew(
            acks=tuple(grant.ticket for grant in site.pool.grants_for("gw"))
        ).confirmed
        for grant in confirmed:
            running.append(grant.ticket)
            if grant.ticket.startswith("b"):
                served += 1
        if not site.pool.queue.counts["batch"]:
            assert isinstance(site.arm(f"b{turn}x", service_class="batch", tenant="b"), Queued)
    assert served >= 1_500 * site.pool.rules.queue.share_batch // 1_000 // 2


# Ours: a tenant with nothing open does not wait for a flood of others.
def test_a_newcomer_is_placed_at_once_beside_a_flood():
    site = Site(2, sequences=8)
    for i in range(200):
        site.arm(f"flood{i}", tenant="flood")
    assert site.open() == [7, 7]
    assert isinstance(site.arm("first", tenant="small"), Placed)
    assert isinstance(site.arm("second", tenant="small"), Queued), "it has one open now"
    assert isinstance(site.arm("other", tenant="other"), Placed)
    assert isinstance(site.arm("third", tenant="third"), Queued), "each worker has one lane"
    site.finish("first")
    assert site.pool.grants_for("gw")[0].ticket in {"second", "third"}


def test_who_floods_is_refused_and_not_who_waits_beside():
    rules = PoolRules(lease_ms=600_000, shed=ShedRules(samples_min=1, share_wait_ms=10_000))
    site = Site(1, rules, sequences=4)
    site.serve("measured", stay_ms=4_000)
    for i in range(4):
        site.arm(f"run{i}", tenant="flood")
    site.arm("small0", tenant="small")
    answers = [site.arm(f"flood{i}", tenant="flood") for i in range(20)]
    refused = [answer for answer in answers if isinstance(answer, Dropped)]
    assert {answer.reason for answer in refused} == {"over_share"}
    assert all(answer.expected_wait_ms >= 1_000 for answer in refused)
    assert isinstance(site.arm("small1", tenant="small"), Queued)


def test_who_cannot_be_done_in_time_hears_of_the_wait_at_once():
    rules = PoolRules(lease_ms=600_000, shed=ShedRules(samples_min=1))
    site = Site(1, rules, sequences=2)
    site.serve("measured", stay_ms=2_000)
    for i in range(2):
        site.arm(f"run{i}")
    assert isinstance(site.arm("patient", deadline_ms=site.now_ms + 60_000), Queued)
    hasty = site.arm("hasty", deadline_ms=site.now_ms + 2_500)
    assert hasty == Dropped(reason="too_late", expected_wait_ms=2_000)
    assert "hasty" not in site.pool.tickets
    assert site.pool.queue.counts["standard"] == 1


def test_a_head_with_less_time_left_than_it_takes_is_dropped():
    rules = PoolRules(lease_ms=600_000, shed=ShedRules(samples_min=1))
    site = Site(1, rules, sequences=1)
    site.serve("measured", stay_ms=2_000)
    site.arm("run")
    assert isinstance(site.arm("t1", deadline_ms=site.now_ms + 9_000), Queued)
    site.now_ms += 7_500
    site.finish("run")
    assert site.pool.grants_for("gw")[0].outcome == Dropped(reason="expired")
