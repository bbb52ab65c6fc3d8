"""Gateways, workers and Postgres killed fifty times under load: the books are right each time.

`make soak` does the same a thousand times.
"""

import logging
import secrets

import pytest

from tests.support.kill_report import report
from tests.support.kill_run import run
from tests.support.kill_stack import a_stack

pytestmark = [pytest.mark.anyio, pytest.mark.services, pytest.mark.slow]

KILLS = 50


async def test_no_kill_makes_the_books_wrong() -> None:
    seed = secrets.randbelow(10**9)
    logging.getLogger("psycopg").setLevel(logging.ERROR)  # Postgres that dies is the point
    with a_stack() as stack:
        tally = await run(stack, seed=seed, kills=KILLS, tell=lambda _: None)
    told = report(tally)
    assert tally.count >= KILLS, told
    assert tally.answers > KILLS, told
    # It proves something only if the kills came in the middle of something.
    for step in ("placed", "streaming", "ended, not settled", "settled, not acked"):
        assert tally.requests[step], told
