"""Much to look through: in bounded slices, each row once, and not a line for each."""

import pytest

from control_plane.reconciler import LINES_MAX, Reconciler
from store import reconcile
from store.reconcile import Feed
from tests.support.ledger_commands import a_usage, a_witness
from tests.support.reconciler_case import (
    lines,
)

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def copies(case, count, *, uncounted):
    """`count` more requests that failed at no cost, the first so many with a word not counted."""
    request_id, _ = await case.request()
    await case.run("UPDATE usage SET cause = 'failed', billed_micro = 0")
    columns = [
        name
        for (name,) in await case.rows(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'usage'::regclass AND attnum > 0"
        )
    ]
    rest = ", ".join(name for name in columns if name != "request_id")
    async with case.pg.transaction() as conn:
        await conn.execute(
            f"INSERT INTO usage (request_id, {rest})"
            f" SELECT 'copy_' || lpad(n::text, 6, '0'), {rest} FROM usage, generate_series(1, %s) n"
            " WHERE request_id = %s",
            (count, request_id),
        )
        # One journal's batch after another.
        await conn.execute(
            "INSERT INTO witnesses SELECT 'copy_' || lpad(n::text, 6, '0'), w.month, w.attempt,"
            " w.source, w.replica_id, w.prompt_tokens, 0, 0, 0,"
            " w.output_tokens + CASE WHEN n <= %s AND w.source = 'journal' THEN 1 ELSE 0 END, 0,"
            " w.exact, w.final, w.cause, w.at_ms,"
            " now() - interval '1 minute' + n / 200 * interval '100 milliseconds'"
            " FROM witnesses w, generate_series(1, %s) n WHERE w.request_id = %s",
            (uncounted, count, request_id),
        )
    await case.run("UPDATE reconcile_cursors SET at = now() - interval '3 days'")


async def test_a_word_that_says_more_comes_again_and_one_repeated_does_not(case):
    request_id, _ = await case.request()
    await case.rounds()

    async def come():
        async with case.pg.transaction() as conn:
            done = await reconcile.next_words(
                conn, Feed.WORDS, window_ms=60_000, lag_ms=0, limit=10
            )
            await reconcile.move(conn, Feed.WORDS, done)
        return done.subjects

    await case.ledger.reconcile(a_witness(request_id, source="checkpoint"))
    assert await come() == [request_id]
    await case.ledger.reconcile(a_witness(request_id, source="checkpoint"))
    assert await come() == []
    word = a_witness(request_id, source="checkpoint", usage=a_usage(output=25))
    await case.ledger.reconcile(word)
    assert await come() == [request_id]


async def test_a_backlog_is_worked_off_in_bounded_slices(case, caplog):
    await copies(case, 10_000, uncounted=250)
    seen, sizes, window_ms = [], [], 1_000
    async with case.pg.transaction() as conn:
        more = True
        while more:
            done = await reconcile.next_words(
                conn, Feed.WORDS, window_ms=window_ms, lag_ms=0, limit=1_000
            )
            await reconcile.move(conn, Feed.WORDS, done)
            seen += done.subjects
            sizes.append(len(done.subjects))
            more, window_ms = done.more, window_ms * 2
    assert max(sizes) == 1_000
    copied = [request_id for request_id in seen if request_id.startswith("copy_")]
    assert sorted(copied) == [f"copy_{n:06}" for n in range(1, 10_001)]

    await case.run("UPDATE reconcile_cursors SET at = now() - interval '3 days'")
    rounds = 0
    while (
        await case.rows(
            "SELECT at < now() - interval '2 seconds' FROM reconcile_cursors WHERE feed = 'words'"
        )
    )[0][0] or case.count("corrections_total") < 250:
        # Each by another process: all that is known of the way is in Postgres.
        case.reconciler = Reconciler(case.services)
        await case.rounds(1)
        rounds += 1
        assert rounds < 40
    assert case.told() == {"uncounted": 250}
    assert case.count("corrections_total") == 250
    wrong = await case.rows(
        "SELECT FROM usage WHERE request_id LIKE 'copy_%'"
        " AND metered_output_tokens <> 20 + (right(request_id, 6)::int <= 250)::int"
    )
    assert wrong == []
    # Not a line for each: a failure of many must not bury the rest of the log.
    assert sum(line.get("further", 1) for line in lines(caplog)) == 250
    assert len(lines(caplog)) < 250
    assert sum("subject" in line for line in lines(caplog)) >= LINES_MAX
