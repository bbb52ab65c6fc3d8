"""One control plane leads: who takes over, what a fence lets through, and who finds out."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.background import Background, Job
from control_plane.leader import ROLE, Leadership
from control_plane.metrics import Metrics
from store import leader
from store.leader import NotLeaderError, Term
from store.postgres import Postgres, PostgresConfig, StoreAwayError
from tests.support.control_plane import running, the_settings
from tests.support.leader_twin import LeaseTwin
from tests.support.own_loop import OwnLoop

pytestmark = [pytest.mark.services, pytest.mark.anyio]

ROOT = Path(__file__).parents[3]
LONG_MS = 600_000
BOUND_S = 30.0


@pytest.fixture
async def pg(fresh_postgres_url):
    pg = await Postgres.open(
        PostgresConfig(
            database_url=fresh_postgres_url, application_name="test", lock_timeout_ms=100
        )
    )
    yield pg
    await pg.close()


def a_leadership(pg, holder, **changes):
    return Leadership(pg, Metrics(), holder=holder, **{"lease_ms": LONG_MS, **changes})


async def expire(pg):
    async with pg.transaction() as conn:
        await conn.execute("UPDATE leaders SET expires_at = clock_timestamp()")


async def fenced(pg, leadership):
    async with pg.transaction() as conn:
        await leadership.fence(conn)


async def until(condition):
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 - bounded by the timeout
            await asyncio.sleep(0.005)


async def freeze(pg, term, successor):
    """In a leader's transaction until another leads, and then one statement more."""
    async with pg.transaction() as conn:
        await leader.fence(conn, term, transaction_ms=300)
        await expire(pg)
        async with asyncio.timeout(BOUND_S):
            while not successor.held:
                with contextlib.suppress(StoreAwayError):
                    await successor.step()
        await conn.execute("SELECT")


async def test_one_leads_and_another_after_its_lease(pg):
    one, two = a_leadership(pg, "one"), a_leadership(pg, "two")
    await one.step()
    await two.step()
    assert (one.held, two.held, one.epoch, two.epoch) == (True, False, 1, 0)
    await fenced(pg, one)
    with pytest.raises(NotLeaderError, match="two does not lead"):
        await fenced(pg, two)
    await expire(pg)
    await two.step()
    assert (two.held, two.epoch) == (True, 2)
    # One still believes; the fence knows.
    assert one.held
    with pytest.raises(NotLeaderError, match="one leads no more in term 1"):
        await fenced(pg, one)
    await one.step()
    assert not one.held


async def test_a_leader_hands_over_when_it_closes(pg):
    one, two = a_leadership(pg, "one"), a_leadership(pg, "two")
    await one.step()
    await one.close()
    assert not one.held
    await two.step()
    assert two.held


async def test_what_a_leader_has_under_way_ends_before_another_leads_and_it_renews_meanwhile(pg):
    one, two = a_leadership(pg, "one"), a_leadership(pg, "two")
    await one.step()
    async with pg.transaction() as conn:
        await one.fence(conn)
        await one.step()
        assert (one.held, one.epoch) == (True, 1)
        await expire(pg)
        with pytest.raises(StoreAwayError):  # lock timeout
            await two.step()
        assert not two.held
    await two.step()
    assert two.held


async def test_a_leader_that_freezes_within_a_transaction_holds_others_up_for_a_while_only(pg):
    one, two = a_leadership(pg, "one"), a_leadership(pg, "two")
    await one.step()
    with pytest.raises(StoreAwayError):
        await freeze(pg, Term(role=ROLE, holder="one", epoch=1), two)
    assert two.epoch == 2


async def test_a_round_that_began_in_another_term_is_refused(pg):
    one, two = a_leadership(pg, "one"), a_leadership(pg, "two")
    await one.step()
    with one.within_term():
        await expire(pg)
        await two.step()
        await expire(pg)
        await one.step()
        assert (one.held, one.epoch) == (True, 3)
        with pytest.raises(NotLeaderError, match="term 1"):
            await fenced(pg, one)
    await fenced(pg, one)


async def test_a_process_that_was_away_for_longer_than_its_lease_believes_nothing(pg):
    now = 5
    one = a_leadership(pg, "one", clock_ms=lambda: now)
    await one.step()
    now += LONG_MS - 1
    assert one.held
    now += 1
    assert not one.held
    with pytest.raises(NotLeaderError):
        await fenced(pg, one)
    now -= 10 * LONG_MS  # and a clock that jumps back gives it no more than the server does
    await expire(pg)
    with pytest.raises(NotLeaderError):
        await fenced(pg, one)


async def test_nobody_leads_while_postgres_is_away(own_postgres):
    from store.migrate import upgrade  # noqa: PLC0415 - as in conftest

    url = own_postgres.create_database("leaders")
    upgrade(url)
    pg = await Postgres.open(
        PostgresConfig(
            database_url=url, application_name="test", connect_timeout_s=1, acquire_timeout_s=0.5
        )
    )
    one = Leadership(pg, Metrics(), holder="one", lease_ms=1000)
    one.start()
    await until(lambda: one.held)
    own_postgres.running.kill()
    await until(lambda: not one.held)
    own_postgres.running.start()
    await until(lambda: one.held)
    await one.close()
    await pg.close()


async def test_leaders_jobs_run_on_the_leader_alone_and_a_fenced_one_is_not_ill(pg):
    runs = {"one": 0, "two": 0}
    planes = []
    for name in runs:
        leadership = a_leadership(pg, name)
        metrics = Metrics()

        async def decide(name=name, leadership=leadership):
            await fenced(pg, leadership)
            runs[name] += 1

        background = Background(metrics, timeout_ms=5000, backoff_max_ms=5, leadership=leadership)
        planes.append((leadership, background, metrics))
        background.start([Job(name="decide", every_ms=1, run=decide, leader=True)])
    (one, first, metrics), (two, second, _) = planes
    await one.step()
    await two.step()
    await until(lambda: runs["one"] >= 3)
    assert runs["two"] == 0
    await expire(pg)
    await two.step()
    await until(lambda: runs["two"] >= 3)
    labels = {"job": "decide", "outcome": "fenced"}
    name = "headworks_control_plane_job_runs_total"
    await until(lambda: metrics.registry.get_sample_value(name, labels))
    assert metrics.registry.get_sample_value(name, labels | {"outcome": "failed"}) is None
    await first.close()
    await second.close()


async def test_health_and_metrics_say_who_leads(fresh_postgres_url, valkey_url):
    async with running(the_settings(fresh_postgres_url, valkey_url)) as plane:
        await until(lambda: plane.services.leadership.held)
        assert (await plane.client.get("/health/ready")).json()["leads"] is True
        assert "headworks_control_plane_leads 1.0" in (await plane.client.get("/metrics")).text
        async with plane.services.postgres.connection() as conn:
            found = await leader.leader(conn, ROLE)
        assert (found.holder, found.leads) == (plane.services.leadership.holder, True)


class Processes:
    """Processes that lead (tests.support.leading), and what they decided, in order."""

    def __init__(self, url):
        self.url = url
        self.conn = psycopg.connect(url, autocommit=True)
        self.conn.execute(
            "CREATE TABLE decided (id bigserial, holder text, epoch bigint,"
            " at timestamptz DEFAULT clock_timestamp())"
        )
        self.children = {}

    def start(self, holder):
        self.children[holder] = subprocess.Popen(
            [sys.executable, "-m", "tests.support.leading", self.url, holder], cwd=ROOT
        )

    def signal(self, holder, how):
        os.kill(self.children[holder].pid, how)

    def decided(self):
        return self.conn.execute("SELECT holder, epoch FROM decided ORDER BY id").fetchall()

    def await_decision(self, holder, *, more=1):
        wanted = sum(who == holder for who, _ in self.decided()) + more
        deadline = time.monotonic() + BOUND_S
        while sum(who == holder for who, _ in self.decided()) < wanted:
            assert time.monotonic() < deadline, holder
            time.sleep(0.02)

    def close(self):
        for child in self.children.values():
            child.kill()
            child.wait()
        self.conn.close()


def test_a_leader_killed_or_frozen_is_replaced_and_decides_nothing_once_it_thaws(
    fresh_postgres_url,
):
    processes = Processes(fresh_postgres_url)
    try:
        processes.start("one")
        processes.await_decision("one", more=3)
        processes.start("two")
        processes.signal("one", signal.SIGSTOP)
        processes.await_decision("two", more=3)
        processes.signal("one", signal.SIGCONT)
        processes.await_decision("two", more=20)
        processes.signal("two", signal.SIGKILL)
        processes.await_decision("one", more=3)
        decided = processes.decided()
    finally:
        processes.close()
    terms = list(dict.fromkeys(decided))
    assert terms == [("one", 1), ("two", 2), ("one", 3)]
    assert decided == sorted(decided, key=lambda row: row[1]), "no term's decision after the next"


WHO = st.sampled_from(["a", "b"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["take", "renew", "release", "fence", "begin", "end"]), WHO),
        st.tuples(st.just("pass"), st.sampled_from([1, 400, 1000])),
    ),
    max_size=25,
)


class Interleaving:
    """Two would-be leaders on a row whose clock the test moves, beside the twin."""

    LEASE_MS = 1000

    def __init__(self, pg):
        self.pg = pg
        self.twin = LeaseTwin()
        self.terms = {"a": Term(role="t", holder="a", epoch=0)}
        self.terms["b"] = Term(role="t", holder="b", epoch=0)
        self.open = {}

    async def run(self, steps):
        async with self.pg.transaction() as conn:
            await conn.execute("DELETE FROM leaders")
        for what, who in steps:
            await getattr(self, what if what != "pass" else "let_pass")(who)
        for who in list(self.open):
            await self.end(who)

    async def take(self, who):
        expected = self.twin.take(who, self.LEASE_MS)
        try:
            async with self.pg.transaction() as conn:
                term = await leader.take(conn, role="t", holder=who, lease_ms=LONG_MS)
        except StoreAwayError:
            assert self.twin.held_by, "nothing else locks the row"
            term = None
        assert (None if term is None else term.epoch) == expected
        self.terms[who] = term or self.terms[who]

    async def renew(self, who):
        term = self.terms[who]
        expected = self.twin.renew(who, term.epoch, self.LEASE_MS)
        async with self.pg.transaction() as conn:
            assert await leader.renew(conn, term, lease_ms=LONG_MS) is expected

    async def release(self, who):
        self.twin.release(who, self.terms[who].epoch)
        async with self.pg.transaction() as conn:
            await leader.release(conn, self.terms[who])

    async def fence(self, who):
        term = self.terms[who]
        async with self.pg.transaction() as conn:
            if self.twin.leads(who, term.epoch):
                return await leader.fence(conn, term, transaction_ms=60_000)
            with pytest.raises(NotLeaderError):
                await leader.fence(conn, term, transaction_ms=60_000)
        return None

    async def begin(self, who):
        """A leader's transaction that stays open over the steps that follow."""
        term = self.terms[who]
        if who in self.open or not self.twin.leads(who, term.epoch):
            return
        block = self.pg.transaction()
        conn = await block.__aenter__()
        await leader.fence(conn, term, transaction_ms=60_000)
        self.open[who] = block
        self.twin.held_by.add(who)

    async def end(self, who):
        if who in self.open:
            await self.open.pop(who).__aexit__(None, None, None)
            self.twin.held_by.remove(who)

    async def let_pass(self, ms):
        """The server's clock cannot be moved: the row's own end is."""
        self.twin.now_ms += ms
        if self.twin.now_ms >= self.twin.until_ms:
            await expire(self.pg)


@given(steps=STEPS)
@settings(suppress_health_check=list(HealthCheck), max_examples=40)
def test_two_leaders_in_any_order_are_told_what_the_twin_says(postgres_url, steps):
    with OwnLoop() as loop:
        loop.run(interleaved(postgres_url, steps))


async def interleaved(url, steps):
    pg = await Postgres.open(
        PostgresConfig(database_url=url, application_name="test", lock_timeout_ms=30)
    )
    try:
        await Interleaving(pg).run(steps)
    finally:
        await pg.close()
