"""Who is next: by class, by share, by virtual token counter."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.fair_queue import (
    CLASSES,
    COST_UNITS,
    FairQueue,
    QueueRules,
    cost,
)
from core.ranking import Ranking

RULES = QueueRules()


def a_queue(**changes: int) -> FairQueue:
    return FairQueue(QueueRules(**changes))


def take(queue: FairQueue, blocks: int = 1) -> str:
    """Serve the next ticket, as the dispatcher does."""
    head = queue.head(())
    queue.served(head.service_class, blocks, owed=head.owed)
    queue.remove(head.service_class, head.tenant, head.ticket)
    return head.ticket


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(-5, 5) | st.none())))
def test_a_ranking_is_a_sorted_dictionary(steps):
    ranking, model = Ranking(), {}
    for member, number in steps:
        if number is None:
            ranking.drop(member)
            model.pop(member, None)
        else:
            ranking.put(member, number)
            model[member] = number
        expected = sorted((number, member) for member, number in model.items())
        assert list(ranking) == expected
        assert ranking.first(2) == expected[:2]
        assert len(ranking) == len(model)
        assert ranking.get(member) == model.get(member)
        assert (member in ranking) == (member in model)


def test_a_tenant_s_own_tickets_go_in_the_order_they_came():
    queue = a_queue()
    for ticket in ("t1", "t2", "t3"):
        queue.push("standard", "a", ticket)
    queue.push("standard", "a", "back", at_head=True)
    assert [take(queue) for _ in range(4)] == ["back", "t1", "t2", "t3"]
    assert queue.head(()) is None
    assert len(queue) == 0


def test_higher_classes_go_first():
    queue = a_queue()
    for name in reversed(CLASSES):
        queue.push(name, "a", name)
    assert [take(queue) for _ in CLASSES] == list(CLASSES)


def test_the_tenant_with_the_smaller_counter_goes_first():
    queue = a_queue()
    queue.charge("a", 10)
    queue.push("standard", "a", "a1")
    queue.charge("b", 10)
    queue.push("standard", "b", "b1")
    queue.charge("a", 5)
    assert queue.head(()).ticket == "b1"
    queue.charge("b", 20)
    assert queue.head(()).ticket == "a1"
    queue.charge("b", -20)
    assert queue.head(()).ticket == "b1"
    queue.charge("b", 0)
    queue.charge("b", -1_000)
    assert queue.counter("b") == 0


def test_tenants_already_tried_are_passed_over():
    queue = a_queue()
    for tenant in ("a", "b"):
        queue.push("standard", tenant, f"{tenant}1")
    queue.push("batch", "a", "a2")
    tried = {("standard", "a")}
    assert queue.head(tried).ticket == "b1"
    tried.add(("standard", "b"))
    assert queue.head(tried).ticket == "a2"
    tried.add(("batch", "a"))
    assert queue.head(tried) is None


def test_idling_saves_nothing_up():
    queue = a_queue()
    queue.charge("busy", 1_000)
    queue.push("standard", "busy", "b1")
    queue.push("standard", "idle", "i1")
    assert queue.counter("idle") == queue.counter("busy") == 1_000


def test_nor_does_idling_while_nobody_waits():
    queue = a_queue()
    queue.charge("busy", 1_000)
    queue.push("standard", "busy", "b1")
    take(queue)
    queue.push("standard", "idle", "i1")
    assert queue.counter("idle") == 1_000


def test_entering_does_not_lower_a_counter():
    queue = a_queue()
    queue.push("standard", "a", "a1")
    queue.charge("b", 50)
    queue.push("standard", "b", "b1")
    assert queue.counter("b") == 50


def test_an_emptied_class_owes_nothing_but_keeps_its_debt():
    queue = a_queue(share_batch=500)
    queue.push("batch", "a", "b1")
    queue.push("interactive", "a", "i1")
    queue.push("interactive", "a", "i2")
    assert take(queue, blocks=4) == "i1"
    assert queue.credits["batch"] == 2_000
    assert take(queue, blocks=10) == "b1"
    assert queue.credits["batch"] == -8_000


def test_a_class_alone_is_served_by_right_and_spends_no_share():
    queue = a_queue(share_batch=1_000)
    queue.push("interactive", "a", "i1")
    queue.push("batch", "a", "b1")
    queue.push("batch", "a", "b2")
    take(queue, blocks=2)
    head = queue.head(())
    assert (head.ticket, head.owed) == ("b1", False)


def test_saved_up_share_is_bounded():
    queue = a_queue(share_batch=1_000, credit_blocks_max=7)
    queue.push("batch", "a", "b1")
    queue.push("interactive", "a", "i1")
    queue.served("interactive", 50, owed=False)
    assert queue.credits["batch"] == 7_000


@pytest.mark.parametrize(("share", "batch_blocks"), [(10, 1), (10, 9), (100, 5), (250, 40)])
def test_a_lower_class_gets_its_share_and_no_more_while_higher_ones_wait(share, batch_blocks):
    queue = a_queue(share_batch=share)
    for name, blocks in (("interactive", 3), ("batch", batch_blocks)):
        for i in range(2):
            queue.push(name, "a", f"{name} {blocks} {i}")
    given_to = {"interactive": 0, "batch": 0}
    for turn in range(6_000):
        head = queue.head(())
        blocks = 3 if head.service_class == "interactive" else batch_blocks
        queue.remove(head.service_class, "a", head.ticket)
        queue.push(head.service_class, "a", f"{head.service_class} {turn}")
        queue.served(head.service_class, blocks, owed=head.owed)
        given_to[head.service_class] += blocks
    earned = given_to["interactive"] * share // 1_000
    assert abs(given_to["batch"] - earned) <= batch_blocks + 1


@given(
    seed=st.integers(0, 10_000),
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=2),
    largest=st.integers(1, 200),
)
def test_two_backlogged_tenants_are_served_alike_up_to_one_request_each(seed, weights, largest):
    dice, queue = random.Random(seed), a_queue()
    service = [0, 0]
    for i in (0, 1):
        queue.push("standard", f"ten{i}", f"{i}")
    for turn in range(300):
        head = queue.head(())
        i = int(head.tenant[3:])
        queue.push("standard", head.tenant, f"{i} {turn}")
        queue.remove("standard", head.tenant, head.ticket)
        tokens = dice.randint(1, largest)
        served = cost(input_tokens=tokens, output_tokens=tokens, weight=weights[i])
        queue.charge(head.tenant, served)
        service[i] += served
        # The bound of the paper, with one request at a time: each at most one request ahead.
        assert abs(service[0] - service[1]) <= 3 * largest * COST_UNITS


def test_cost_counts_output_twice_over_the_weight():
    assert cost(input_tokens=10, output_tokens=5, weight=1) == 20 * COST_UNITS
    assert cost(input_tokens=10, output_tokens=5, weight=4) == 5 * COST_UNITS


def test_forgotten_tenants_start_from_the_last_one_forgotten():
    queue = a_queue(tenants_max=2)
    for tenant, counter in (("a", 10), ("b", 20), ("c", 30)):
        queue.charge(tenant, counter)
    assert queue.counter("a") == 10
    assert [tenant for _, tenant in queue.counters] == ["b", "c"]
    queue.charge("d", 1)
    assert queue.counter("unknown") == 11
    assert len(queue.counters) == 2


def test_a_full_class_is_full_by_itself():
    queue = a_queue(queue_max=1)
    queue.push("batch", "a", "b1")
    assert queue.is_full("batch")
    assert not queue.is_full("standard")
    assert queue.position("interactive") == 0
    assert queue.position("batch") == 1
