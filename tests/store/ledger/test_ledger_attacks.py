"""What was tried against the ledger to make it lose or find money, and did once."""

import asyncio
import secrets
import time
from datetime import UTC, datetime

import msgspec
import psycopg
import pytest

from core.caps import FOR_GOOD, Period
from core.ledger import TAKEN_BACK
from core.metering import Adjust, AdjustmentKind, LedgerRefused
from core.money import EndCause
from core.witnesses import heard_from
from store.accounts import account, caps_of, entries_page, set_cap
from store.leases import Sweeper, SweeperConfig, SweepReport
from store.ledger import BILLING_CAUSES, NotReservedError
from store.ledger_audit import audit
from store.queries import load
from store.retention import make_partitions, retire_month
from store.rollups import differences, roll_up
from tests.support.ledger_commands import a_reserve, a_settle, a_top_up, a_usage, a_witness
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.anyio, pytest.mark.services]

DAY_MS = 86_400_000
NOW_MS = time.time_ns() // 1_000_000
HEAR = load("ledger")["hear"]
# Its ids tell a time of which no partition is made ahead.
FAR_MS = NOW_MS + 200 * DAY_MS
# The ledger's clock, each session's own.
CLOCK = """
CREATE OR REPLACE FUNCTION ledger_today() RETURNS date LANGUAGE sql STABLE AS $$
    SELECT coalesce(nullif(current_setting('test.today', true), '')::date,
                    (now() AT TIME ZONE 'UTC')::date)
$$
"""


@pytest.fixture
def postgres_url(fresh_postgres_url):
    """Months are made and dropped here, and each test audits all there is."""
    return fresh_postgres_url


@pytest.fixture
async def tenant(pg):
    return await a_tenant(pg)


@pytest.fixture
async def another(postgres_url):
    """A session beside the ledger's, in a transaction."""
    conn = await psycopg.AsyncConnection.connect(postgres_url)
    yield conn
    await conn.close()


def an_id(at_ms=NOW_MS):
    return f"req_local_{at_ms:012x}{secrets.token_hex(8)}"


def a_refund(tenant, request_id, amount, **changes):
    fields = {"id": secrets.token_hex(4), "reason": "said so", "author": "admin"} | changes
    return Adjust(
        tenant_id=tenant,
        kind=AdjustmentKind.REFUND,
        request_id=request_id,
        amount_micro=amount,
        **fields,
    )


async def a_request(ledger, tenant, at_ms=NOW_MS, **changes):
    """Billed 50."""
    request_id = an_id(at_ms)
    await ledger.reserve(a_reserve(request_id, tenant_id=tenant, created_ms=at_ms, **changes))
    await ledger.settle(a_settle(request_id, tenant_id=tenant))
    return request_id


def month_name(at_ms):
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Ym%m")


async def make_month(pg, at_ms):
    day = datetime.fromtimestamp(at_ms / 1000, UTC).date()
    await do(pg, "SELECT ledger_make_partitions(%s, 1)", [day])


def a_word(*request_ids):
    """A journal's last word on each, in JSON."""
    word = msgspec.structs.asdict(heard_from(a_witness(at_ms=1)))
    places = [{"request_id": name, "attempt": 1, "source": "journal"} for name in request_ids]
    return msgspec.json.encode([place | word for place in places]).decode()


async def read(pg, statement, values=()):
    async with pg.connection() as conn:
        return await (await conn.execute(statement, values)).fetchall()


async def do(pg, statement, values=()):
    async with pg.transaction() as conn:
        await conn.execute(statement, values)


async def assert_in_order(pg, *tenants):
    """The audit has nothing to say, and the sums are what the rows are."""
    while (await roll_up(pg)).entries:
        pass
    async with pg.connection() as conn:
        assert (await audit(conn)).violations == ()
        for tenant in tenants:
            assert await differences(conn, tenant) == []


async def somebody_waits_for_a_lock(pg):
    waiting = """
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
    """
    async with asyncio.timeout(10):
        while not await read(pg, waiting):  # noqa: ASYNC110 - the database has no event for it
            await asyncio.sleep(0.01)


async def test_what_is_refunded_is_not_given_back_again_by_a_late_word(pg, ledger, tenant):
    """The sweeper bills it, an operator refunds it, and the gateway says that it failed."""
    async with pg.transaction() as conn:
        await set_cap(conn, tenant, "", Period.DAY, soft_micro=None, hard_micro=1_000)
    lost = an_id()
    await ledger.reserve(a_reserve(lost, tenant_id=tenant))
    await ledger.reconcile(a_witness(lost, source="checkpoint", final=False, cause=""))
    await do(pg, "SELECT ledger_expire(%s, 1, %s)", ([lost], BILLING_CAUSES))
    assert (await ledger.adjust(a_refund(tenant, lost, 30))).posted_micro == 20
    await roll_up(pg)
    settled = await ledger.settle(a_settle(lost, tenant_id=tenant, cause=EndCause.FAILED))
    assert settled.billed_micro == 0
    async with pg.connection() as conn:
        back, fall, *_ = await entries_page(conn, tenant, limit=3)
        (cap,) = await caps_of(conn, tenant)
    assert (fall.kind, fall.posted_delta_micro, fall.posted_micro) == ("correction", -50, -30)
    assert (back.kind, back.posted_delta_micro, back.posted_micro) == ("refund", 30, 0)
    assert (back.reason, back.author, back.adjustment_id) == (TAKEN_BACK, "", "")
    assert cap.posted_micro == 0
    await assert_in_order(pg, tenant)
    again = await ledger.adjust(a_refund(tenant, lost, 1))
    assert again == LedgerRefused(reason="too_much")


async def test_a_new_cap_counts_the_day_after_its_own(pg, ledger, tenant, another):
    """It was set before midnight and had the account after, when somebody had reserved."""
    await do(pg, CLOCK)
    today, tomorrow = "2026-03-31", "2026-04-01"
    await do(pg, f"ALTER DATABASE {another.info.dbname} SET test.today = '{tomorrow}'")
    for request_id in ("early", "late"):
        await ledger.reserve(a_reserve(request_id, tenant_id=tenant))
    await ledger.settle(a_settle("early", tenant_id=tenant))
    await another.execute(f"SET test.today = '{today}'")
    for period in Period:
        await set_cap(another, tenant, "", period, soft_micro=50, hard_micro=1_000)
    await another.commit()
    windows = "SELECT starts::text, posted_micro, reserved_micro, soft_passed_at IS NOT NULL \
               FROM cap_windows WHERE period = %s ORDER BY 1"
    first, second = await read(pg, windows, ["day"])
    assert (first, second) == ((today, 0, 0, False), (tomorrow, 50, 100, True))
    await ledger.settle(a_settle("late", tenant_id=tenant))
    await assert_in_order(pg, tenant)


async def test_a_new_cap_for_good_counts_months_that_are_gone(pg, ledger, tenant):
    old_ms = NOW_MS - 150 * DAY_MS
    await make_month(pg, old_ms)
    await a_request(ledger, tenant, old_ms)
    refunded = await a_request(ledger, tenant, old_ms, key_id="key_2")
    await ledger.adjust(a_refund(tenant, refunded, 20))
    await a_request(ledger, tenant)
    await roll_up(pg)
    assert (await retire_month(pg, int(month_name(old_ms).replace("m", "")))).requests == 2
    async with pg.transaction() as conn:
        for key in ("", "key_1", "key_2"):
            for period in (Period.TOTAL, Period.MONTH):
                await set_cap(conn, tenant, key, period, soft_micro=None, hard_micro=1_000)
        caps = await caps_of(conn, tenant)
    assert {cap.key_id: cap.posted_micro for cap in caps if cap.starts == FOR_GOOD} == {
        "": 130,
        "key_1": 100,
        "key_2": 30,
    }
    await assert_in_order(pg, tenant)


async def test_a_month_is_made_while_a_row_of_it_comes(pg, ledger, tenant, another):
    ended, heard_of = await a_request(ledger, tenant, FAR_MS), an_id(FAR_MS)
    await another.execute(HEAR, {"witnesses": a_word(heard_of)})
    making = asyncio.create_task(make_month(pg, FAR_MS))
    await somebody_waits_for_a_lock(pg)
    await another.commit()
    await making
    assert await read(pg, "SELECT count(*) FROM usage_other") == [(0,)]
    late = await read(pg, f"SELECT request_id FROM witnesses_y{month_name(FAR_MS)} ORDER BY at_ms")
    assert late == [(heard_of,), (ended,)]
    await assert_in_order(pg, tenant)


async def test_words_are_heard_in_one_order(pg, ledger, another):
    """Two that have the same words from several workers do not wait for each other."""
    await another.execute(HEAR, {"witnesses": a_word("a")})
    hearing = asyncio.create_task(do(pg, HEAR, {"witnesses": a_word("b", "a")}))
    await somebody_waits_for_a_lock(pg)
    await another.execute(HEAR, {"witnesses": a_word("b")})
    await another.commit()
    await hearing
    assert await read(pg, "SELECT count(*) FROM witnesses") == [(2,)]


async def test_words_about_others_do_not_wait_for_a_locked_account(pg, ledger, tenant, another):
    free = await a_tenant(pg)
    kept, open_one = await a_request(ledger, tenant), an_id()
    await ledger.reserve(a_reserve(open_one, tenant_id=tenant))
    others = [await a_request(ledger, free) for _ in range(3)]
    lock = "SELECT FROM accounts WHERE tenant_id = %s FOR NO KEY UPDATE"
    await another.execute(lock, (tenant,))
    more = a_usage(10, 0, 30)
    waiting = asyncio.gather(
        *(ledger.reconcile(a_witness(n, usage=more)) for n in (kept, open_one))
    )
    for again in (1, 2):  # together with them, and while they are waiting
        words = [a_witness(name, usage=more) for name in (*others, f"unknown_{again}")]
        async with asyncio.timeout(3):
            *counted, unknown = await asyncio.gather(*map(ledger.reconcile, words))
        assert [settled.metered.output_tokens for settled in counted] == [30, 30, 30]
        assert unknown is None
    assert not waiting.done()
    await another.rollback()
    settled, still_open = await waiting
    assert settled.metered.output_tokens == 30
    assert still_open is None
    await assert_in_order(pg, tenant, free)


async def test_one_locked_account_keeps_nobody_from_being_swept(pg, ledger, tenant, another):
    free = await a_tenant(pg)
    kept, let_go = an_id(), an_id()
    await ledger.reserve(a_reserve(kept, tenant_id=tenant))
    await ledger.reserve(a_reserve(let_go, tenant_id=free))
    lock = "SELECT FROM accounts WHERE tenant_id = %s FOR NO KEY UPDATE"
    await another.execute(lock, (tenant,))
    sweeper = Sweeper(pg, SweeperConfig(grace_ms=0, lease_ms=50))
    assert await sweeper.sweep() == SweepReport()
    await asyncio.sleep(0.1)
    assert await sweeper.sweep() == SweepReport(not_started=1, waiting=1, gateways=("gw_1",))
    assert await read(pg, "SELECT request_id FROM reservations") == [(kept,)]
    await another.rollback()
    assert await sweeper.sweep() == SweepReport(not_started=1, gateways=("gw_1",))
    await assert_in_order(pg, tenant, free)


async def test_a_request_of_another_is_out_of_reach(pg, ledger, tenant):
    other = await a_tenant(pg)
    held, ended = an_id(), await a_request(ledger, tenant)
    await ledger.reserve(a_reserve(held, tenant_id=tenant))
    before = await read(pg, "SELECT * FROM accounts ORDER BY tenant_id")
    for request_id in (held, ended):
        assert await ledger.reserve(a_reserve(request_id, tenant_id=other)) == LedgerRefused(
            reason="id_reused"
        )
        assert await ledger.top_up(a_top_up(request_id, tenant_id=other)) == LedgerRefused(
            reason="not_open"
        )
        for word in (
            ledger.settle(a_settle(request_id, tenant_id=other)),
            ledger.release(request_id, other, ended_ms=1),
        ):
            with pytest.raises(NotReservedError):
                await word
        assert await ledger.adjust(a_refund(other, request_id, 1)) == LedgerRefused(
            reason="no_request"
        )
    assert await read(pg, "SELECT * FROM accounts ORDER BY tenant_id") == before
    await assert_in_order(pg, tenant, other)


ODD_IDS = {
    "": 0,
    "_" * 29: 0,
    "é" * 40: 0,
    "_" + "\N{ARABIC-INDIC DIGIT THREE}" * 28: 0,
    "x" * 5_000: 0,
    "a'b\"\\\n(,)": 0,
    "_" + "f" * 28: 0,
    f"req_x_{'A' * 28}": 0,
    f"req_x_{'0' * 28}": 197001,
    f"req_x_e677d21fdbff{'f' * 16}": 999912,
    f"req_x_e677d21fdc00{'0' * 16}": 0,
}


async def test_ids_of_any_shape_have_one_place(pg, ledger, tenant):
    for request_id, month in ODD_IDS.items():
        await ledger.reserve(a_reserve(request_id, tenant_id=tenant))
        settled = await ledger.settle(a_settle(request_id, tenant_id=tenant))
        assert settled.billed_micro == 50
        assert await ledger.settle(a_settle(request_id, tenant_id=tenant)) == settled
        late = await ledger.reconcile(a_witness(request_id, usage=a_usage(10, 5, 20)))
        assert late.metered.cached_tokens == 5
        found = await read(pg, "SELECT month FROM usage WHERE request_id = %s", [request_id])
        assert found == [(month,)]
    await assert_in_order(pg, tenant)


# Whoever reads may have these set.
SESSIONS = [
    "SET timezone = 'Asia/Kolkata'",
    "SET datestyle = 'SQL, DMY'",
    "SET bytea_output = 'escape'",
    "SET extra_float_digits = -15",
]
REASONS = [
    'a"b\\c\n(,)',
    "\N{NEXT LINE}\N{NO-BREAK SPACE} ",
    "\t",
    "NULL",
    "\\N",
    '"',
    "(1,2)\n(3,4)",
]


async def test_the_chain_reads_the_same_in_every_session(pg, ledger, tenant, another):
    request_id = await a_request(ledger, tenant)
    for reason in REASONS:
        await ledger.adjust(a_refund(tenant, request_id, 1, reason=reason, author=reason))
    await another.rollback()
    for setting in SESSIONS:
        await another.execute(setting)
        await another.commit()
        assert (await audit(another)).violations == (), setting
        await another.commit()
    async with pg.connection() as conn:
        found = await account(conn, tenant)
    assert found is not None
    assert found.posted_micro == 50 - len(REASONS)
    await make_partitions(pg)  # of months that have come since the migration was written
    assert await make_partitions(pg) == 0
