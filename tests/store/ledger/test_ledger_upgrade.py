"""A ledger of the first schema, with money in it, is brought to the newest: nothing is lost."""

import json
import secrets
import threading
import time
from contextlib import closing

import psycopg
import pytest

from core.metering import LedgerRefused, Reserve, Reserved
from core.money import EndCause
from store.accounts import account
from store.leases import Sweeper, SweeperConfig
from store.ledger import BILLING_CAUSES, Ledger
from store.ledger_audit import audit
from store.migrate import upgrade
from store.postgres import Postgres, PostgresConfig
from store.reconcile import verify_entries
from tests.support.ledger_commands import a_reserve, a_settle, a_top_up, a_usage, a_witness

pytestmark = [pytest.mark.anyio, pytest.mark.services]

PRICE = "('price_test', 'smol', 'USD', 1000000, 100000, 2000000, 0, 0)"
APART = {"request_id", "tenant_id", "floor_micro", "claim"}
ASKED = [name for name in Reserve.__struct_fields__ if name not in APART]
BALANCES = "SELECT tenant_id, reserved_micro, posted_micro, entries FROM accounts ORDER BY 1"
ENTRIES = """
SELECT tenant_id, seq, request_id, kind, reserved_delta_micro, posted_delta_micro,
       extract(epoch FROM at)
FROM entries ORDER BY 1, 2
"""
# What an operator may have set for a whole database.
ODD = {
    "timezone": "Asia/Kolkata",
    "datestyle": "German, DMY",
    "intervalstyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-10",
    "default_transaction_isolation": "repeatable read",
}
MANY = 1_200  # reservations at once: more entries than one link covers


def old_reserve(request_id, tenant, **changes):
    asked = a_reserve(request_id, tenant_id=tenant, **changes)
    return {"request_id": request_id, "tenant_id": tenant} | {
        name: getattr(asked, name) for name in ASKED
    }


def old_settle(request_id, tenant):
    totals = {"prompt_tokens": 10, "cached_tokens": 0, "output_tokens": 20}
    return {
        "request_id": request_id,
        "tenant_id": tenant,
        "cause": "complete",
        "attempts": [{"attempt": 1, "replica_id": "rep_1", "usage": totals}],
        "delivered_tokens": 20,
        "timings": {"total_ms": 99.25},
        "ended_ms": 2_000,
    }


def apply(conn, tenants, *, reserves=(), settles=()):
    """As the first ledger said it."""
    words = [json.dumps(words) if words else None for words in (settles, reserves)]
    return conn.execute(
        "SELECT refused FROM ledger_apply(%s, %s, NULL, %s, %s)",
        (tenants, *words, BILLING_CAUSES),
    ).fetchall()


@pytest.fixture
def tenants():
    return sorted(f"ten_{secrets.token_hex(12)}" for _ in range(3))


@pytest.fixture
def old_url(empty_postgres_url, tenants):
    """The first with requests open and ended, the second at its cap, the third with nothing."""
    first, second, third = tenants
    upgrade(empty_postgres_url, "0002")
    with closing(psycopg.connect(empty_postgres_url, autocommit=True)) as conn:
        conn.execute(f"INSERT INTO prices VALUES {PRICE}")
        for tenant, cap in ((first, None), (second, 250), (third, None)):
            conn.execute(
                "INSERT INTO tenants (id, name, salt, version) VALUES (%s, %s, %s, 0)",
                (tenant, tenant, bytes(16)),
            )
            conn.execute("INSERT INTO accounts VALUES (%s, %s)", (tenant, cap))
        many = [old_reserve(f"req_local_{n:024x}", first) for n in range(MANY)]
        capped = [old_reserve(f"{second}_{n}", second) for n in range(3)]
        assert apply(conn, [first, second], reserves=many + capped[:2])[-1] == (None,)
        assert apply(conn, [second], reserves=capped[2:]) == [("hard_cap",)]
        ended = [(many[n]["request_id"], first) for n in range(5)] + [(f"{second}_0", second)]
        apply(conn, [first, second], settles=[old_settle(*one) for one in ended])
        word = {
            "request_id": many[7]["request_id"],
            "attempt": 1,
            "source": "checkpoint",
            "replica_id": "rep_1",
            "usage": {"prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 5},
            "exact": False,
            "final": False,
            "cause": "",
            "at_ms": 1,
        }
        conn.execute(
            "SELECT ledger_hear(ARRAY(SELECT i FROM json_populate_recordset("
            "NULL::witness_word, %s) AS i))",
            (json.dumps([word]),),
        )
        conn.execute("SELECT ledger_expire(%s, 1, %s)", ([many[7]["request_id"]], BILLING_CAUSES))
    return empty_postgres_url


def configure(conn, settings):
    for name, value in settings.items():
        conn.execute(f"ALTER DATABASE {conn.info.dbname} SET {name} = '{value}'")


async def assert_in_order(url, tenants):
    pg = await Postgres.open(PostgresConfig(database_url=url, application_name="test"))
    async with pg.connection() as conn:
        assert (await audit(conn)).violations == ()
    async with pg.transaction() as conn:
        assert await verify_entries(conn, tenants, lines=4_000) == ([], False)
    assert (await Sweeper(pg, SweeperConfig()).sweep()).waiting == 0
    await pg.close()


async def somebody_waits_for_a_lock(pg):
    waiting = """
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
    """
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        async with pg.connection() as conn:
            if await (await conn.execute(waiting)).fetchall():
                return
    pytest.fail("nobody does")


@pytest.mark.parametrize("settings", [{}, ODD], ids=["plain", "odd"])
async def test_an_old_ledger_goes_on_where_it_was(old_url, tenants, settings):
    first, second, _ = tenants
    with closing(psycopg.connect(old_url, autocommit=True)) as conn:
        configure(conn, settings)
        before = conn.execute(BALANCES).fetchall(), conn.execute(ENTRIES).fetchall()
    upgrade(old_url)
    with closing(psycopg.connect(old_url, autocommit=True)) as conn:
        assert (conn.execute(BALANCES).fetchall(), conn.execute(ENTRIES).fetchall()) == before
        links = "SELECT count(chain) FROM entries WHERE tenant_id = %s"
        assert conn.execute(links, (first,)).fetchone() == (2,)
    await assert_in_order(old_url, tenants)

    ledger = await Ledger.open(old_url)
    open_id, ended_id = f"req_local_{9:024x}", f"req_local_{1:024x}"
    same = await ledger.reserve(a_reserve(open_id, tenant_id=first))
    assert same == Reserved(reserved_micro=100)
    assert await ledger.top_up(a_top_up(open_id, tenant_id=first)) == Reserved(reserved_micro=200)
    settled = await ledger.settle(a_settle(open_id, tenant_id=first))
    assert (settled.billed_micro, settled.cause) == (50, EndCause.COMPLETE)
    await ledger.reconcile(a_witness(ended_id, usage=a_usage(output=30)))
    await ledger.settle(a_settle(f"req_local_{7:024x}", tenant_id=first))
    assert await ledger.reserve(a_reserve(f"{second}_2", tenant_id=second)) == LedgerRefused(
        reason="hard_cap",
        limit="account.total",
        reserved_micro=200,
        hard_cap_micro=250,
        fits_micro=50,
    )
    await ledger.close()
    await assert_in_order(old_url, tenants)


@pytest.mark.parametrize("settings", [{}, ODD], ids=["plain", "odd"])
async def test_a_batch_under_way_is_not_lost(old_url, tenants, settings):
    first, *_ = tenants
    upgrade(old_url, "0003")
    with closing(psycopg.connect(old_url)) as conn:
        configure(conn, settings)
        conn.commit()
        apply(conn, [first], reserves=[old_reserve("late", first)])
        upgrading = threading.Thread(target=upgrade, args=(old_url,))
        upgrading.start()
        pg = await Postgres.open(PostgresConfig(database_url=old_url, application_name="test"))
        await somebody_waits_for_a_lock(pg)
        conn.commit()
        upgrading.join()
    async with pg.connection() as conn:
        found = await account(conn, first)
        assert found is not None
        assert found.reserved_micro == 100 * (MANY - 5)
    await pg.close()
    await assert_in_order(old_url, tenants)
