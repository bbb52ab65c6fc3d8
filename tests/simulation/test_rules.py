"""Each rule can fail: what it says when one thing is off."""

import msgspec
import pytest

from core.dispatch import Pool, PoolRules
from core.ledger import Expire
from core.money import EndCause
from core.tickets import Arm, Renew, ReplicaView
from simulator.bank_rules import BankRules
from simulator.orders import Attempt
from simulator.pool_rules import idle_problems, pool_problems, room_problems
from simulator.rest_rules import LATE_MS, PATIENCE_MS, order_problems
from tests.support.simulated_orders import reserve, served

VIEW = ReplicaView(
    replica="r", boot_id="b", url="r", version="v", ready=True, kv_blocks=10, sequences=2
)


def change_row(facts, **changes):
    row = facts.book.rows["r1"]
    facts.book.rows["r1"] = msgspec.structs.replace(row, **changes)


def test_a_served_order_is_in_order():
    order, facts = served()
    assert order_problems(order, facts) == []
    assert BankRules(facts.book).problems() == BankRules(facts.book).rest_problems() == []


ORDER_CHANGES = {
    "starves": {"cause": None},
    "after its deadline": {"ended_ms": 60_001 + LATE_MS},
    "though all went well": {"ended_ms": 1_001 + PATIENCE_MS},
    "is not the answer": {"got": [[63, 63]]},
    "before its end": {"got": [[]]},
    "the ledger says": {"cause": EndCause.EXPIRED},
    "delivered 99": {"delivered": 99},
    "prompt tokens": {"prompt": (1, 2)},
    "produced only": {"attempts": {1: Attempt("w", {0: 0}, {0: 0})}},
    "the journal survived": {"attempts": {1: Attempt("w", {0: 0}, {0: 50})}},
}


@pytest.mark.parametrize(("said", "changes"), ORDER_CHANGES.items())
def test_what_is_wrong_with_an_order_is_said(said, changes):
    order, facts = served()
    for name, value in changes.items():
        setattr(order, name, value)
    assert said in " ".join(order_problems(order, facts))


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("still open", {"cause": None}),
        ("only the sweeper", {"provisional": True}),
    ],
)
def test_what_is_wrong_with_its_row_is_said(said, changes):
    order, facts = served()
    change_row(facts, **changes)
    assert said in " ".join(order_problems(order, facts))


def test_a_bill_for_more_than_was_asked_for_is_said():
    order, facts = served()
    change_row(facts, billed_micro=10_000)
    assert "what it asked for costs" in " ".join(order_problems(order, facts))


def test_a_bill_for_more_than_the_answer_is_said():
    order, facts = served()
    order.cause = EndCause.COMPLETE
    change_row(facts, cause=EndCause.COMPLETE, accepted_tokens=99)
    assert "pays for 99 tokens" in " ".join(order_problems(order, facts))


def test_work_for_a_request_never_reserved_is_said():
    order, facts = served()
    facts.book.rows.clear()
    assert "never reserved" in " ".join(order_problems(order, facts))


def test_what_is_wrong_with_balances_is_said():
    _, facts = served()
    book = facts.book
    book.accounts["ten"] = msgspec.structs.replace(
        book.accounts["ten"], posted_micro=7, reserved_micro=7, hard_cap_micro=1
    )
    said = " ".join(BankRules(book).problems())
    assert "open requests hold 0" in said
    assert "7 posted" in said
    assert "7 + 7 over 1" in said


def test_a_second_end_is_said():
    _, facts = served()
    rules = BankRules(facts.book)
    assert rules.problems() == []
    change_row(facts, cause=EndCause.COMPLETE)
    assert "ended twice" in " ".join(rules.problems())


def test_what_is_left_over_at_rest_is_said():
    _, facts = served()
    facts.book.reserve(reserve("r2"))
    change_row(facts, billed_micro=1)
    said = " ".join(BankRules(facts.book).rest_problems())
    assert "still has 100 reserved" in said
    assert "r1 was billed 1" in said
    facts.book.expire(Expire(request_id="r2", ended_ms=0))


def a_pool():
    pool = Pool(PoolRules(reannounce_ms=0))
    pool.renew(Renew(gateway="gw", pool="p", epoch="", replicas=(VIEW,), announces=True), 1_000)
    pool.arm(
        Arm(
            ticket="t",
            gateway="gw",
            pool="p",
            tenant="ten",
            weight=1,
            service_class="standard",
            deadline_ms=0,
            kv_blocks=4,
            prompt_tokens=8,
        ),
        1_000,
    )
    assert pool_problems(pool) == room_problems(pool) == []
    return pool


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("its tickets are 1 of 4", {"open": 0}),
        ("do not add up", {"unreported_blocks": 1}),
        ("free by report", {"reported_free": -1}),
    ],
)
def test_an_account_that_is_off_is_said(said, changes):
    pool = a_pool()
    for name, value in changes.items():
        setattr(pool.replicas["r"], name, value)
    assert said in " ".join(pool_problems(pool))


@pytest.mark.parametrize("state", ["queued", "granted"])
def test_a_ticket_in_a_state_nobody_knows_of_is_said(state):
    pool = a_pool()
    pool.tickets["t"].state = state
    assert len(pool_problems(pool)) == 1


def test_a_ticket_of_another_gateway_is_said():
    pool = a_pool()
    pool.tickets["t"].gateway = "other"
    assert "gateways own other tickets" in " ".join(pool_problems(pool))


def test_a_replica_given_too_much_is_said():
    pool = a_pool()
    pool.replicas["r"].total = 3
    assert "and has 3" in " ".join(room_problems(pool))


def test_what_an_idle_pool_still_holds_is_said():
    pool = a_pool()
    pool.book.granted["gw"] = {"t"}
    pool.queue.push("standard", "ten", "u")
    said = " ".join(idle_problems(pool))
    for what in ("ticket t is placed", "r holds", "1 grants", "1 queued"):
        assert what in said
