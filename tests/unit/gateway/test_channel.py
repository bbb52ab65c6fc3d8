"""The queue between a request and its response: order, bounds, and who wakes whom."""

import asyncio

import pytest

from core.errors import Code, Refusal
from core.protocol import Usage
from gateway.conversation import Broke, Delta, Done, Opened
from gateway.relay.channel import Channel

pytestmark = pytest.mark.anyio


def a_delta(number: int) -> Delta:
    return Delta(choice=0, text=str(number))


async def test_events_come_in_order_and_all_that_is_there_at_once() -> None:
    channel = Channel(10)
    for number in range(3):
        channel.push(a_delta(number), tokens=number)
    assert await channel.take(1) == [(a_delta(number), number) for number in range(3)]


async def test_a_reader_is_woken_or_gives_up() -> None:
    channel = Channel(10)
    reading = asyncio.create_task(channel.take(5))
    await asyncio.sleep(0)
    channel.push(a_delta(1))
    assert await reading == [(a_delta(1), 0)]
    assert await channel.take(0.01) == []


async def test_a_cancelled_reader_loses_nothing() -> None:
    channel = Channel(10)
    reading = asyncio.create_task(channel.take(5))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    channel.push(a_delta(1))
    assert await channel.take(1) == [(a_delta(1), 0)]


async def test_a_full_channel_holds_its_writer_but_takes_the_last_event() -> None:
    channel = Channel(2)
    channel.push(a_delta(1))
    await channel.room()
    channel.push(a_delta(2))
    waiting = asyncio.create_task(channel.room())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    channel.end(Done(usage=Usage()))
    assert len(await channel.take(1)) == 3
    await waiting
    with pytest.raises(AssertionError):
        channel.push(a_delta(3))


OPENED = Opened(prompt_tokens=3)
BROKE = Broke(refusal=Refusal(code=Code.INTERNAL, message="it broke"))


async def test_a_head_that_waits_is_told_with_what_comes_next_or_not_at_all() -> None:
    channel = Channel(10)
    channel.head_waits = True
    firsts: list[bool] = []
    channel.on_first = lambda: firsts.append(True)
    channel.push(OPENED)
    assert not channel.begun
    channel.forget_head()  # whoever it was is not asked any more
    channel.push(OPENED)
    assert (await channel.take(0.01), firsts) == ([], [])
    channel.push(a_delta(1), tokens=1)
    assert (await channel.take(1), firsts) == ([(OPENED, 0), (a_delta(1), 1)], [True])


async def test_an_answer_without_a_word_still_has_its_head_and_a_broken_one_has_none() -> None:
    for last, told in ((Done(usage=Usage()), [OPENED]), (BROKE, [])):
        channel = Channel(10)
        channel.head_waits = True
        channel.push(OPENED)
        channel.end(last)
        assert [event for event, _ in await channel.take(1)] == [*told, last]
