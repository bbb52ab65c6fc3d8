"""What gateways say of themselves: a spool that does not drain, words that were refused."""

import pytest

from store.leases import assert_lease
from tests.support.reconciler_case import (
    lines,
)

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def a_gateway(case, *, spool_bytes=0, refused_words=0):
    async with case.pg.transaction() as conn:
        await assert_lease(
            conn, "gw_1", "local", 5_000, spool_bytes=spool_bytes, refused_words=refused_words
        )


async def test_a_spool_is_given_time_to_drain(case):
    await a_gateway(case, spool_bytes=4_096)
    await case.rounds()
    assert await case.rows("SELECT kind FROM differences") == [("spool",)]
    await a_gateway(case)
    await case.rounds()
    assert await case.rows("SELECT kind FROM differences") == []

    await a_gateway(case, spool_bytes=4_096)
    await case.rounds()
    assert await case.differences() == []
    await case.run("UPDATE differences SET noticed_at = now() - interval '2 hours'")
    await a_gateway(case, spool_bytes=9_999)
    await case.rounds(3)
    assert await case.differences() == [("spool", "gw_1", None)]
    assert case.told() == {"spool": 1}
    await a_gateway(case)
    await case.rounds()
    assert await case.differences() == [("spool", "gw_1", "gone")]


async def test_refused_words_are_told_again_when_there_are_more(case, caplog):
    for words in (0, 2, 2, 5):
        await a_gateway(case, refused_words=words)
        await case.rounds()
    assert case.told() == {"refused_words": 2}
    assert [line["detail"] for line in lines(caplog)] == [
        "2 words were refused",
        "5 words were refused",
    ]
    # They are on its disk, whatever becomes of the gateway.
    await case.run("DELETE FROM gateways")
    await case.rounds()
    assert await case.differences() == [("refused_words", "gw_1", None)]
