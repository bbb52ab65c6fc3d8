"""The choice of a replica: whom it looks at, what speaks for one, and what is kept for whom."""

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.placement import PlacementRules, Replica, candidates, fits, room, score
from core.protocol import Load
from core.replicas import Replicas, Wanted
from core.tickets import ReplicaView

RULES = PlacementRules()
NOW_MS = 1_000_000


def a_view(name: str = "r1", **changes: object) -> ReplicaView:
    view = ReplicaView(
        replica=name,
        boot_id=f"boot_{name}",
        url="u",
        version="v",
        ready=True,
        kv_blocks=100,
        sequences=4,
    )
    return msgspec.structs.replace(view, **changes)


class Fleet:
    """Replicas and the tickets on them."""

    def __init__(self, *views: ReplicaView, rules: PlacementRules = RULES) -> None:
        self.replicas = Replicas(rules)
        self.replicas.announce(views, NOW_MS)
        self.opened = 0

    def hold(self, name: str, blocks: int = 1, *, in_lane: bool = False) -> None:
        self.opened += 1
        replica = self.replicas.all[name]
        self.replicas.hold(replica, f"t{self.opened}", self.opened, blocks, in_lane=in_lane)

    def chosen(self, blocks: int = 1, where: str = "anywhere", protected: int = 0, **asked):
        found = self.replicas.choose(
            wanted(blocks, **asked), where, protected=protected, now_ms=NOW_MS
        )
        return None if found is None else found.replica

    def protected(self, blocks: int = 1, exclude: tuple[str, ...] = (), now_ms: int = NOW_MS):
        number = self.replicas.protect(wanted(blocks, exclude), now_ms)
        return self.replicas.numbers.get(number)


def wanted(blocks: int, exclude: tuple[str, ...] = (), matched=None, hash_count: int = 0) -> Wanted:
    return Wanted(blocks=blocks, exclude=exclude, matched=matched or {}, hash_count=hash_count)


def many(count: int, **changes: object) -> Iterable[ReplicaView]:
    return (a_view(f"r{i:03}", **changes) for i in range(count))


# Which one.


def test_the_replica_that_has_seen_the_prefix_is_chosen_until_it_is_much_busier():
    fleet = Fleet(a_view("cold", sequences=10), a_view("warm", sequences=10))
    warm = fleet.replicas.all["warm"].number
    seen = {"matched": {warm: 4}, "hash_count": 4}
    assert fleet.chosen(**seen) == "warm"
    for _ in range(9):
        fleet.hold("warm", 10)
    assert fleet.chosen(**seen) == "cold"


# sglang P14305: a cache hit, or a miss, is sent where load is not looked at. prime-rl P3255: an
# affinity blind to load locks an engine that thrashes its cache.
def test_a_hot_prefix_spills_instead_of_overloading_its_owner():
    fleet = Fleet(*many(4, sequences=0, kv_blocks=100_000))
    owner = fleet.replicas.all["r000"].number
    for _ in range(80):
        fleet.hold(fleet.chosen(matched={owner: 8}, hash_count=8))
    shares = [replica.open for replica in fleet.replicas.all.values()]
    assert sum(shares) == 80
    assert max(shares) <= 80 // 4 * RULES.affinity_percent // 100 + 1
    assert shares[0] == max(shares), "its owner keeps as much as it may"


def test_a_quiet_owner_keeps_its_prefix():
    fleet = Fleet(*many(8, sequences=0))
    owner = fleet.replicas.all["r003"].number
    for _ in range(RULES.affinity_floor):
        name = fleet.chosen(matched={owner: 8}, hash_count=8)
        assert name == "r003"
        fleet.hold(name)


# AIBrix #2422: between choosing and counting a burst picks the same replica.
def test_a_burst_in_one_moment_is_spread_evenly():
    fleet = Fleet(*many(4, sequences=100, kv_blocks=1_000))
    for _ in range(100):
        fleet.hold(fleet.chosen())
    assert [replica.open for replica in fleet.replicas.all.values()] == [25, 25, 25, 25]


def test_ties_go_to_the_first_name_and_protected_ones_to_nobody():
    fleet = Fleet(a_view("r2"), a_view("r1"), a_view("r3"))
    first = fleet.replicas.all["r1"].number
    assert fleet.chosen() == "r1"
    assert fleet.chosen(protected=first) == "r2"
    assert Fleet().chosen() is None


@given(
    loads=st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=12),
    blocks=st.integers(1, 60),
)
def test_among_few_replicas_the_choice_is_the_best_of_all_that_fit(loads, blocks):
    fleet = Fleet(*many(len(loads)))
    for i, held in enumerate(loads):
        for size in held:
            if fits(fleet.replicas.all[f"r{i:03}"], size):
                fleet.hold(f"r{i:03}", size)
    able = [r for r in fleet.replicas.all.values() if fits(r, blocks)]
    best = min(able, key=lambda r: (-score(r, 0, 0, RULES), r.open, r.replica), default=None)
    assert fleet.chosen(blocks) == (best.replica if best else None)


class Counting(dict[str, Replica]):
    """Counts how often a replica is read."""

    reads = 0

    def __getitem__(self, name: str) -> Replica:
        Counting.reads += 1
        return super().__getitem__(name)


@pytest.mark.parametrize("size", [32, 512])
def test_a_choice_looks_at_as_many_replicas_in_a_large_pool_as_in_a_small_one(size):
    fleet = Fleet(*many(size, sequences=64))
    for i in range(0, size, 3):
        fleet.hold(f"r{i:03}", 5)
    fleet.replicas.all = Counting(fleet.replicas.all)
    Counting.reads = 0
    matched = dict.fromkeys(range(1, size + 1), 3)
    assert fleet.chosen(matched=matched, hash_count=4) is not None
    assert Counting.reads <= 2 * RULES.looks_max


def test_a_fit_is_found_among_many_that_are_full():
    fleet = Fleet(*many(64, sequences=2))
    for i in range(63):
        fleet.hold(f"r{i:03}", 1)
        fleet.hold(f"r{i:03}", 1)
    assert fleet.chosen() == "r063"
    fleet.hold("r063", 60)
    assert fleet.chosen(41) is None
    assert fleet.chosen(40) == "r063"


def test_an_excluded_replica_comes_back_when_there_is_no_other():
    fleet = Fleet(a_view("r1"), a_view("r2"))
    assert fleet.chosen(exclude=("r1",)) == "r2"
    assert fleet.chosen(exclude=("r1", "r2")) == "r1"
    assert fleet.protected(exclude=("r1",)) == "r2"
    assert fleet.protected(101, exclude=("r1",)) is None


# What is kept.


def test_the_freest_replica_is_protected():
    fleet = Fleet(a_view("r1"), a_view("r2"), a_view("r3", kv_blocks=5))
    fleet.hold("r1", 10)
    assert fleet.protected(8) == "r2"
    fleet.hold("r2", 20)
    assert fleet.protected(8) == "r1"
    assert fleet.protected(101) is None
    assert Fleet().protected() is None


def test_one_slot_of_a_large_replica_is_a_lane():
    fleet = Fleet(a_view(sequences=8))
    for _ in range(7):
        assert fleet.chosen(where="beside the lane") == "r1"
        fleet.hold("r1")
    assert fleet.chosen(where="beside the lane") is None
    assert fleet.chosen(where="in the lane") == "r1"
    fleet.hold("r1", in_lane=True)
    assert fleet.chosen(where="in the lane") is None
    replica = fleet.replicas.all["r1"]
    fleet.replicas.release(replica, "t1", 1, in_lane=False)
    assert fleet.chosen(where="in the lane") is None, "there is one lane, and somebody is in it"
    assert fleet.chosen(where="beside the lane") == "r1"
    fleet.hold("r1")
    fleet.replicas.release(replica, "t8", 1, in_lane=True)
    assert fleet.chosen(where="in the lane") == "r1"
    assert (replica.lane_open, replica.lane_blocks) == (0, 0)


def test_a_small_replica_has_no_lane():
    fleet = Fleet(a_view(sequences=2))
    fleet.hold("r1")
    assert fleet.chosen(where="in the lane") is None
    assert fleet.chosen(where="beside the lane") == "r1"


def test_blocks_are_kept_too_where_slots_are_not_counted():
    fleet = Fleet(a_view(sequences=0))
    fleet.hold("r1", 90)
    lane = RULES.lane_percent
    assert fleet.chosen(10 - lane, where="beside the lane") == "r1"
    assert fleet.chosen(10 - lane + 1, where="beside the lane") is None
    assert fleet.chosen(lane, where="in the lane") == "r1"
    assert fleet.chosen(lane + 1, where="in the lane") is None
    fleet.hold("r1", lane, in_lane=True)
    assert fleet.chosen(10 - lane, where="beside the lane") == "r1", "what is used is not kept"
    assert fleet.chosen(1, where="in the lane") is None


def test_an_idle_replica_may_be_filled_by_one_ticket():
    assert Fleet(a_view(sequences=8)).chosen(100, where="beside the lane") == "r1"


# Its views.


def test_what_a_former_life_held_is_not_counted_and_its_number_is_forgotten():
    fleet = Fleet(a_view("r1"), a_view("r2"))
    fleet.hold("r1", 10)
    number = fleet.replicas.all["r1"].number
    assert fleet.replicas.open == 1
    fleet.replicas.announce([a_view("r1", boot_id="another")], NOW_MS)
    assert fleet.replicas.open == 0
    assert number not in fleet.replicas.numbers
    assert fleet.chosen(matched={number: 9}, hash_count=9) == "r1"


def test_a_replica_that_takes_no_work_is_not_ranked():
    fleet = Fleet(a_view("r1"), a_view("r2"))
    fleet.replicas.announce([a_view("r1", ready=False)], NOW_MS)
    assert fleet.chosen() == "r2"
    assert (fleet.replicas.ready, fleet.replicas.largest) == (1, 100)
    fleet.replicas.announce([a_view("r1")], NOW_MS)
    assert fleet.chosen() == "r1"


# llm-d-router #2100, #2408: stale metrics read as saturated, so all dispatch halts.
def test_stale_reports_never_take_a_replica_out():
    fleet = Fleet(a_view("r1"))
    load = Load(
        boot_id="boot_r1", seq=1, kv_blocks_total=100, kv_blocks_free=0, running=9, waiting=9,
        placed_seq=0,
    )  # fmt: skip
    fleet.replicas.report("r1", load)
    fleet.replicas.report("unknown", load)
    assert fleet.chosen() == "r1", "with nothing of ours open all of it is free"


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["r000", "r001", "r002"]), st.integers(1, 30), st.booleans()),
        max_size=40,
    )
)
def test_every_ready_replica_is_ranked_by_its_room(steps):
    fleet = Fleet(*many(3, sequences=9))
    held = []
    for name, blocks, opens in steps:
        replica = fleet.replicas.all[name]
        if opens and fits(replica, blocks):
            fleet.hold(name, blocks)
            held.append((replica, f"t{fleet.opened}", blocks))
        elif held:
            replica, ticket, size = held.pop(0)
            fleet.replicas.release(replica, ticket, size, in_lane=False)
        expected = sorted((-room(r), r.replica) for r in fleet.replicas.all.values())
        assert list(fleet.replicas.rooms) == expected
        assert fleet.replicas.open == len(held)


def test_candidates_are_those_that_could_ever_hold_it():
    fleet = Fleet(a_view("r1"), a_view("small", kv_blocks=5))
    able = candidates(fleet.replicas.all.values(), 10, (), NOW_MS, RULES)
    assert [replica.replica for replica in able] == ["r1"]
