"""A replica's account, and the choice among replicas."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.placement import (
    RETIRED_BOOTS_MAX,
    SCORE_ONE,
    PlacementRules,
    Replica,
    announce,
    candidates,
    fits,
    free_blocks,
    hold,
    release,
    report,
    score,
    usable,
)
from core.protocol import Load
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


def a_replica(name: str = "r1", number: int = 1, **changes: object) -> Replica:
    return announce(None, a_view(name, **changes), number, NOW_MS)


def a_report(free: int, placed_seq: int, seq: int = 1, boot_id: str = "boot_r1") -> Load:
    return Load(
        boot_id=boot_id,
        seq=seq,
        kv_blocks_total=100,
        kv_blocks_free=free,
        running=0,
        waiting=0,
        placed_seq=placed_seq,
    )


def test_free_is_the_last_report_less_what_was_placed_after_it():
    replica = a_replica()
    hold(replica, "t1", 1, 10)
    hold(replica, "t2", 2, 20)
    assert free_blocks(replica) == 70
    report(replica, a_report(free=65, placed_seq=1))
    assert free_blocks(replica) == 45
    report(replica, a_report(free=40, placed_seq=2, seq=2))
    assert free_blocks(replica) == 40


def test_free_is_never_more_than_what_open_tickets_may_leave():
    replica = a_replica()
    hold(replica, "t1", 1, 60)
    report(replica, a_report(free=95, placed_seq=1))
    assert free_blocks(replica) == 40
    assert fits(replica, 40)
    assert not fits(replica, 41)


def test_a_report_that_is_late_or_of_another_life_changes_nothing():
    replica = a_replica()
    hold(replica, "t1", 1, 10)
    report(replica, a_report(free=50, placed_seq=1, seq=5))
    report(replica, a_report(free=10, placed_seq=1, seq=5))
    report(replica, a_report(free=20, placed_seq=1, seq=4))
    report(replica, a_report(free=30, placed_seq=1, seq=9, boot_id="boot_old"))
    assert free_blocks(replica) == 50


def test_what_a_finished_ticket_held_is_free_before_the_next_report():
    replica = a_replica()
    hold(replica, "t1", 1, 30)
    hold(replica, "t2", 2, 30)
    report(replica, a_report(free=40, placed_seq=2))
    release(replica, "t1", 30)
    assert free_blocks(replica) == 70


def test_with_nothing_open_the_whole_replica_is_free_however_old_its_report():
    replica = a_replica()
    hold(replica, "t1", 1, 30)
    release(replica, "t1", 30)
    report(replica, a_report(free=3, placed_seq=1))
    assert free_blocks(replica) == 100
    hold(replica, "t2", 2, 10)
    assert free_blocks(replica) == 90


@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 100), st.integers(-3, 0))
    )
)
def test_an_account_returns_to_zero_with_its_last_ticket(steps):
    replica, open_tickets, number = a_replica(), {}, 0
    for seq, (places, blocks, free, lag) in enumerate(steps):
        if places or not open_tickets:
            number += 1
            hold(replica, f"t{number}", number, blocks)
            open_tickets[f"t{number}"] = blocks
        else:
            ticket, held = open_tickets.popitem()
            release(replica, ticket, held)
        report(replica, a_report(free=free, placed_seq=max(0, number + lag), seq=seq))
        assert replica.open_blocks == sum(open_tickets.values())
        assert replica.unreported_blocks == sum(u.blocks for u in replica.unreported.values())
        assert 0 <= free_blocks(replica) <= max(0, 100 - replica.open_blocks)
    for ticket, blocks in open_tickets.items():
        release(replica, ticket, blocks)
    assert (replica.open, replica.open_blocks, replica.unreported_blocks) == (0, 0, 0)


def test_slots_bound_a_replica_unless_it_says_it_has_none():
    replica = a_replica(sequences=1)
    assert fits(replica, 1)
    hold(replica, "t1", 1, 1)
    assert not fits(replica, 1)
    assert fits(a_replica(sequences=0), 1)


def test_only_ready_replicas_in_view_that_do_not_pause_are_usable():
    replica = a_replica()
    assert usable(replica, NOW_MS, RULES)
    assert usable(replica, NOW_MS + RULES.replica_silent_ms, RULES)
    assert not usable(replica, NOW_MS + RULES.replica_silent_ms + 1, RULES)
    assert not usable(a_replica(ready=False), NOW_MS, RULES)
    replica.paused_until_ms = NOW_MS + 1
    assert not usable(replica, NOW_MS, RULES)
    assert usable(replica, NOW_MS + 1, RULES)


def test_an_excluded_replica_comes_back_when_there_is_no_other():
    one, two, small = a_replica("r1"), a_replica("r2", 2), a_replica("r3", 3, kv_blocks=5)
    pool = [one, two, small]
    assert candidates(pool, 10, ("r1",), NOW_MS, RULES) == [two]
    assert candidates(pool, 10, ("r1", "r2"), NOW_MS, RULES) == [one, two]
    two.paused_until_ms = NOW_MS + 1
    assert candidates(pool, 10, ("r1",), NOW_MS, RULES) == []


@given(
    matched=st.integers(0, 64),
    held=st.lists(st.integers(0, 30), max_size=6),
    sequences=st.integers(0, 8),
    total=st.integers(0, 100),
)
def test_a_score_is_between_nothing_and_one(matched, held, sequences, total):
    replica = a_replica(sequences=sequences, kv_blocks=total)
    for i, blocks in enumerate(held):
        hold(replica, f"t{i}", i, blocks)
    assert 0 <= score(replica, matched, 64, RULES) <= SCORE_ONE
    assert 0 <= score(replica, 0, 0, RULES) <= SCORE_ONE


def test_an_idle_replica_with_the_whole_prefix_scores_one():
    assert score(a_replica(), 5, 5, RULES) == SCORE_ONE


def test_a_view_of_the_same_life_updates_it():
    replica = a_replica()
    hold(replica, "t1", 1, 10)
    view = a_view(ready=False, kv_blocks=50, sequences=2, url="elsewhere")
    known = announce(replica, view, 2, NOW_MS + 5)
    assert known is replica
    assert (known.number, known.open, known.ready, known.url) == (1, 1, False, "elsewhere")
    assert (known.total, known.sequences, known.seen_ms) == (50, 2, NOW_MS + 5)


def test_a_next_life_starts_an_empty_account_and_numbers_on():
    replica = a_replica()
    hold(replica, "t1", 7, 10)
    after = announce(replica, a_view(boot_id="boot_2"), 2, NOW_MS)
    assert (after.number, after.open, after.placed) == (2, 0, 7)


def test_a_view_of_an_earlier_life_changes_nothing():
    replica = a_replica()
    for life in range(2, RETIRED_BOOTS_MAX + 4):
        replica = announce(replica, a_view(boot_id=f"boot_{life}"), life, NOW_MS)
    assert len(replica.retired) == RETIRED_BOOTS_MAX
    before = msgspec.structs.replace(replica)
    late = announce(replica, a_view(boot_id=replica.retired[0], ready=False), 99, NOW_MS + 9)
    assert late is replica
    assert late == before


@pytest.mark.parametrize(("placement", "is_included"), [(1, True), (3, False)])
def test_an_announced_placement_counts_as_reported_by_its_number(placement, is_included):
    replica = a_replica()
    report(replica, a_report(free=80, placed_seq=2))
    hold(replica, "t1", placement, 10)
    assert (replica.unreported == {}) is is_included
