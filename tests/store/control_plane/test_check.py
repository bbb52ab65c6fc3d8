"""`check` on a live system: clean when it is, and finding each fault that is planted."""

import secrets

import pytest
import redis

from core.protocol import Usage
from store.keys import POOL_PARTS, pool_keys
from tests.support.control_plane import SECRET, assert_refused, running, the_settings
from tests.support.dispatch_worlds import an_admit, an_arm
from tests.support.dispatchers import POOL, dispatchers
from tests.support.ledger_commands import a_reserve, a_settle, a_witness, an_attempt
from tests.support.ledger_database import a_tenant
from tests.support.load_server import LoadServer
from tests.support.registry import a_beat, a_deployment, a_register
from tests.support.services import free_port

pytestmark = [pytest.mark.services, pytest.mark.anyio]

ITEMS = [
    "reservations",
    "leases",
    "entries",
    "metered",
    "reconciliation",
    "kv_blocks",
    "journals",
    "tickets",
    "dispatcher_accounts",
]


@pytest.fixture
async def plane(fresh_postgres_url, valkey_url):
    async with running(the_settings(fresh_postgres_url, valkey_url)) as plane:
        yield plane


async def check(plane, *, quiescent=True):
    answer = await plane.admin("GET", "/check", quiescent=quiescent)
    assert answer.status_code == 200, answer.text
    report = answer.json()
    assert [item["name"] for item in report["items"]] == ITEMS
    assert report["quiescent"] is quiescent
    assert report["ok"] == all(item["ok"] for item in report["items"])
    return report


async def off(plane, *, quiescent=True):
    """Names of what is off, and the reasons together."""
    items = [i for i in (await check(plane, quiescent=quiescent))["items"] if not i["ok"]]
    return [item["name"] for item in items], " ".join(item["detail"] for item in items)


async def tamper(plane, statement):
    async with plane.services.postgres.transaction() as conn:
        await conn.execute(statement)


async def a_request(plane, *, is_settled=True):
    """Reserved, and settled with its journal's last word."""
    tenant = await a_tenant(plane.services.postgres)
    request_id = f"req_{secrets.token_hex(8)}"
    ledger = plane.services.ledger
    await ledger.reserve(a_reserve(request_id, tenant_id=tenant, amount_micro=1_000))
    if is_settled:
        usage = Usage(prompt_tokens=10, output_tokens=20)
        await ledger.settle(a_settle(request_id, tenant_id=tenant, attempts=(an_attempt(usage),)))
        await ledger.reconcile(a_witness(request_id, usage=usage))
    return request_id


async def a_replica(plane, url):
    async with plane.services.postgres.transaction() as conn:
        await a_deployment(conn)
    assert (await plane.says("/register", a_register(url=url))).status_code == 200


async def test_a_system_at_rest_is_clean(plane):
    async with LoadServer(SECRET) as replica:
        await a_replica(plane, replica.url)
        for _ in range(3):
            await a_request(plane)
        assert (await check(plane))["ok"]
        assert (await check(plane, quiescent=False))["ok"]


async def test_an_empty_system_is_clean(plane):
    assert (await check(plane))["ok"]


async def test_a_bad_question_is_refused(plane):
    answer = await plane.admin("GET", "/check", quiescent="perhaps")
    assert_refused(answer, 422, "unprocessable", "quiescent")


async def test_an_open_reservation_is_normal_in_flight_and_off_at_rest(plane):
    await a_request(plane, is_settled=False)
    assert (await check(plane, quiescent=False))["ok"]
    assert (await off(plane))[0] == ["reservations"]


async def test_a_reservation_that_nobody_will_close_is_off(plane):
    request_id = await a_request(plane, is_settled=False)
    await tamper(plane, "UPDATE reservations SET opened_at = now() - interval '10 minutes'")
    names, reasons = await off(plane, quiescent=False)
    assert names == ["reservations"]
    assert f"{request_id} of gw_1: its gateway has no lease" in reasons


async def test_a_dead_gateway_with_requests_in_its_name_is_off(plane):
    await a_request(plane, is_settled=False)
    await tamper(
        plane,
        "INSERT INTO gateways (id, region, lease_ms, last_seen)"
        " VALUES ('gw_1', 'local', 5000, now() - interval '10 minutes')",
    )
    names, reasons = await off(plane, quiescent=False)
    assert names == ["reservations", "leases"]
    assert "holds 1" in reasons


async def test_a_balance_that_its_entries_do_not_add_up_to_is_off(plane):
    await a_request(plane)
    await tamper(plane, "UPDATE accounts SET posted_micro = posted_micro + 1")
    names, reasons = await off(plane, quiescent=False)
    assert names == ["entries"]
    assert "ten_" in reasons


async def test_a_usage_row_that_its_journal_contradicts_is_off(plane):
    request_id = await a_request(plane)
    await tamper(plane, "UPDATE usage SET metered_output_tokens = metered_output_tokens - 1")
    names, reasons = await off(plane, quiescent=False)
    assert "metered" in names
    assert request_id in reasons


async def test_tokens_delivered_that_were_not_metered_are_off(plane):
    request_id = await a_request(plane)
    await tamper(plane, "UPDATE usage SET delivered_tokens = 99")
    names, reasons = await off(plane, quiescent=False)
    assert names == ["metered"]
    assert request_id in reasons


async def test_an_attempt_no_journal_has_closed_is_off_at_rest(plane):
    await a_request(plane)
    await tamper(plane, "DELETE FROM witnesses WHERE source = 'journal'")
    assert (await check(plane, quiescent=False))["ok"]
    names, reasons = await off(plane)
    assert names == ["journals"]
    assert "1 ended attempts not closed by a journal" in reasons


@pytest.mark.parametrize(
    ("load", "quiescent", "name", "reason"),
    [
        ({"integrity": False}, False, "kv_blocks", "own check of the cache fails"),
        ({"kv_blocks_free": 60}, False, "kv_blocks", "idle with 4 blocks in use"),
        ({"boot_id": "boot_2"}, False, "kv_blocks", "answers as boot_2"),
        ({"running": 1, "kv_blocks_free": 60}, True, "kv_blocks", "in use by 1 requests"),
        ({"journal_unacked": 2}, True, "journals", "2 attempts not yet delivered"),
    ],
)
async def test_a_replica_that_is_not_well_is_off(plane, load, quiescent, name, reason):
    async with LoadServer(SECRET) as replica:
        replica.load |= load
        await a_replica(plane, replica.url)
        names, reasons = await off(plane, quiescent=quiescent)
    assert names == [name]
    assert reason in reasons


async def test_a_replica_that_cannot_be_asked_is_off_unless_it_has_stopped(plane):
    await a_replica(plane, f"http://127.0.0.1:{free_port()}")
    names, reasons = await off(plane, quiescent=False)
    assert names == ["kv_blocks"]
    assert "rep-0: could not be checked" in reasons
    await plane.says("/beat", a_beat(state="stopped"))
    assert (await check(plane))["ok"]


async def test_a_ticket_is_normal_in_flight_and_off_at_rest(plane, valkey_url):
    async with dispatchers(valkey_url, 1) as (gateway,):
        await gateway.admit(an_admit("t1"))
        await gateway.place(an_arm("t1", kv_blocks=3))
        assert (await check(plane, quiescent=False))["ok"]
        names, reasons = await off(plane)
        assert names == ["tickets", "dispatcher_accounts"]
        assert "3 blocks" in reasons
        await gateway.cancel(ticket="t1", pool=POOL, tenant="ten")
        assert (await check(plane))["ok"]


async def test_an_account_that_its_tickets_do_not_add_up_to_is_off(plane, valkey_url):
    async with dispatchers(valkey_url, 1) as (gateway,):
        await gateway.place(an_arm("t1", kv_blocks=3))
        with redis.Redis.from_url(valkey_url) as valkey:
            valkey.delete(pool_keys(POOL)[POOL_PARTS.index("tickets")])
        names, reasons = await off(plane, quiescent=False)
    assert names == ["tickets"]
    assert "its tickets sum to 0" in reasons
