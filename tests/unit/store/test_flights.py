"""What a gateway has to tell a pool, and that it tells each thing once."""

import pytest

from core.protocol import Load
from core.tickets import Dropped, Placed, Renew
from store.flights import Flight, PoolSide
from tests.support.dispatch_worlds import an_arm

pytestmark = pytest.mark.anyio

PLACED = Placed(replica="r1", boot_id="b", url="u", placement=1)


def a_load(seq: int, boot_id: str = "b") -> Load:
    return Load(
        boot_id=boot_id, seq=seq, kv_blocks_total=9, kv_blocks_free=seq, running=0, waiting=0
    )


def enter(pool: PoolSide, *tickets: str) -> list[Flight]:
    flights = [Flight(ticket, "ten") for ticket in tickets]
    for flight in flights:
        pool.enter(flight, an_arm(flight.ticket))
    return flights


def next_renewal(pool: PoolSide, batch_max: int) -> Renew:
    (message,) = pool.renewals("gw", batch_max)
    return message


@pytest.mark.parametrize("count", range(6))
async def test_an_announcement_tells_every_flight_once_and_says_when_it_is_complete(count):
    pool = PoolSide("p")
    enter(pool, *(f"t{i}" for i in range(count)))
    messages = list(pool.renewals("gw~2", 2))
    held = [arm for message in messages for arm, _ in message.held]
    assert [arm.ticket for arm in held] == [f"t{i}" for i in range(count)]
    assert {arm.gateway for arm in held} <= {"gw~2"}
    assert [message.announces for message in messages] == [False] * (len(messages) - 1) + [True]
    assert all(len(message.held) <= 2 for message in messages)
    assert [message.held for message in pool.renewals("gw~2", 2)] == [()]


async def test_output_is_told_when_it_grew_and_again_after_a_lost_memory():
    pool = PoolSide("p")
    flights = enter(pool, "t1", "t2", "t3")
    list(pool.renewals("gw", 10))
    for flight in flights[:2]:
        flight.output_tokens = 5
    messages = list(pool.renewals("gw", 1))
    assert [message.outputs for message in messages] == [(("t1", 5),), (("t2", 5),)]
    assert next_renewal(pool, 1).outputs == ()
    pool.owes = True
    assert next_renewal(pool, 10).outputs == (("t1", 5), ("t2", 5))


async def test_the_newest_report_of_each_replica_is_told_once():
    pool = PoolSide("p")
    for seq in (2, 3, 1):
        pool.observe("r1", a_load(seq))
    pool.observe("r2", a_load(9))
    pool.observe("r2", a_load(1, "next life"))
    loads = dict(next_renewal(pool, 10).loads)
    assert loads == {"r1": a_load(3), "r2": a_load(1, "next life")}
    assert next_renewal(pool, 10).loads == ()


async def test_acknowledgements_beyond_one_message_wake_the_next():
    pool = PoolSide("p")
    pool.acks = dict.fromkeys(("t1", "t2", "t3"))
    assert next_renewal(pool, 2).acks == ("t1", "t2")
    assert pool.wake.is_set()
    assert next_renewal(pool, 2).acks == ("t3",)


async def test_a_flight_waits_until_it_is_settled_or_leaves():
    pool = PoolSide("p")
    settled, left = enter(pool, "t1", "t2")
    assert pool.is_waiting
    pool.settle(settled, PLACED)
    waiter = left.waiter
    pool.leave(left)
    assert waiter.result() == Dropped(reason="expired")
    assert not pool.is_waiting
    assert not pool.is_idle
    assert next_renewal(pool, 2).held == ((an_arm("t1"), PLACED),)
    pool.leave(settled)
    assert pool.is_idle


async def test_waking_soon_is_asked_for_often_and_done_once():
    pool = PoolSide("p")
    for _ in range(3):
        pool.wake_within(0.001)
    await pool.wake.wait()
    pool.wake.clear()
    pool.wake_within(0.001)
    await pool.wake.wait()
