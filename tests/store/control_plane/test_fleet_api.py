"""What workers say: registration, heartbeats, journals; lives fenced, deliveries repeated."""

import asyncio
import random
import secrets
import time

import msgspec
import pytest

from core import internal_token
from core.fleet import Capacity, Journal, JournalEntry
from core.protocol import Usage
from store import usage
from tests.support.control_plane import (
    ADMIN_TOKEN,
    SECRET,
    assert_refused,
    running,
    the_settings,
    worker_headers,
)
from tests.support.ledger_commands import a_reserve, a_settle, an_attempt
from tests.support.ledger_database import a_tenant
from tests.support.registry import a_beat, a_deployment, a_register

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture
async def worker(plane):
    """A replica id of this test's own, deployed and not yet registered."""
    name = f"rep-{secrets.token_hex(4)}"
    async with plane.services.postgres.transaction() as conn:
        await a_deployment(conn)
    return name


def boot():
    return f"boot_{secrets.token_hex(12)}"


def an_entry(seq, request_id, **changes):
    fields = {
        "attempt": 1,
        "usage": Usage(prompt_tokens=10, output_tokens=20),
        "final": True,
        "cause": "complete",
        "at_ms": 5_000,
    }
    return JournalEntry(seq=seq, request_id=request_id, **(fields | changes))


async def row_of(plane, replica_id):
    rows = (await plane.admin("GET", "/replicas", limit=1000)).json()["replicas"]
    return next(row for row in rows if row["replica_id"] == replica_id)


async def test_a_worker_registers_beats_and_is_listed(plane, worker):
    life = boot()
    answer = await plane.says("/register", a_register(replica_id=worker, boot_id=life))
    assert answer.status_code == 200
    assert answer.json() == {"beat_interval_ms": 1000, "journal_acked": 0}
    answer = await plane.says("/beat", a_beat(replica_id=worker, boot_id=life, running=3))
    assert answer.json() == {"known": True, "drain": False, "drain_ms": None}
    row = await row_of(plane, worker)
    assert (row["boot_id"], row["state"], row["running"]) == (life, "ready", 3)


async def waiting_for_locks(conn):
    cursor = await conn.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    return (await cursor.fetchone())[0]


async def test_lives_are_registered_in_the_order_in_which_they_came(plane, worker):
    await plane.says("/register", a_register(replica_id=worker, boot_id=boot()))
    lives = [boot() for _ in range(3)]
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("SELECT FROM replicas WHERE replica_id = %s FOR UPDATE", (worker,))
        said = []
        for life in lives:
            words = a_register(replica_id=worker, boot_id=life)
            said.append(asyncio.create_task(plane.says("/register", words)))
            await asyncio.sleep(0.1)
        assert await waiting_for_locks(conn) == 1, "the others wait for their turn, not for a lock"
    assert {answer.status_code for answer in await asyncio.gather(*said)} == {200}
    assert (await row_of(plane, worker))["boot_id"] == lives[-1]
    assert len(plane.services.registering) == 0


async def test_a_beat_of_a_replica_nobody_knows_asks_it_to_register(plane, worker):
    answer = await plane.says("/beat", a_beat(replica_id=worker, boot_id=boot()))
    assert (answer.status_code, answer.json()["known"]) == (200, False)


async def test_beats_out_of_order_change_nothing(plane, worker):
    life = boot()
    await plane.says("/register", a_register(replica_id=worker, boot_id=life))
    for seq, running_now in ((5, 2), (4, 9), (5, 9)):
        message = a_beat(replica_id=worker, boot_id=life, seq=seq, running=running_now)
        assert (await plane.says("/beat", message)).json()["known"]
    assert (await row_of(plane, worker))["running"] == 2


async def test_an_older_life_is_fenced_off(plane, worker):
    first, second = boot(), boot()
    for life in (first, second):
        message = a_register(replica_id=worker, boot_id=life)
        assert (await plane.says("/register", message)).status_code == 200
    again = await plane.says("/register", a_register(replica_id=worker, boot_id=first))
    beat = await plane.says("/beat", a_beat(replica_id=worker, boot_id=first, seq=99))
    for answer in (again, beat):
        assert_refused(answer, 409, "conflict")
        assert "older life" in answer.json()["error"]["message"]
    assert (await row_of(plane, worker))["boot_id"] == second


async def test_what_the_deployment_does_not_serve_is_refused_with_the_reason(plane, worker):
    for changes, reason in [
        ({"version": "v2"}, "serves version v1, not v2"),
        ({"deployment": "none"}, "no deployment 'none'"),
        ({"region": "far"}, "is in region 'local'"),
    ]:
        answer = await plane.says(
            "/register", a_register(replica_id=worker, boot_id=boot(), **changes)
        )
        assert_refused(answer, 409, "conflict")
        assert reason in answer.json()["error"]["message"]


async def test_other_weights_under_a_known_name_do_not_replace_what_serves(plane, worker):
    life = boot()
    await plane.says("/register", a_register(replica_id=worker, boot_id=life))
    other = a_register(replica_id=worker, boot_id=boot(), version="v2")
    assert (await plane.says("/register", other)).status_code == 409
    assert (await row_of(plane, worker))["boot_id"] == life


async def test_a_draining_deployment_is_told_with_the_beat(plane, worker):
    name = f"drain-{worker}"
    async with plane.services.postgres.transaction() as conn:
        await a_deployment(conn, name)
    life = boot()
    message = a_register(replica_id=worker, boot_id=life, deployment=name)
    await plane.says("/register", message)
    await plane.admin("PATCH", f"/deployments/{name}", {"desired_state": "draining"})
    answer = await plane.says("/beat", a_beat(replica_id=worker, boot_id=life))
    assert answer.json() == {"known": True, "drain": True, "drain_ms": 600_000}
    answer = await plane.says("/beat", a_beat(replica_id=worker, boot_id=life, seq=2))
    assert 0 < answer.json()["drain_ms"] <= 600_000, "its time runs since it first heard"


async def test_an_impossible_registration_is_refused_by_its_field(plane, worker):
    for changes, param in [
        ({"url": "nowhere"}, "url"),
        ({"replica_id": "a/b"}, "replica_id"),
        (
            {"capacity": Capacity(kv_blocks=2**40, block_tokens=1, context_tokens=1, sequences=1)},
            "capacity.kv_blocks",
        ),
    ]:
        message = a_register(**({"replica_id": worker, "boot_id": boot()} | changes))
        assert_refused(await plane.says("/register", message), 422, "unprocessable", param)


async def test_an_impossible_beat_is_refused_by_its_field(plane, worker):
    message = a_beat(replica_id=worker, boot_id=boot(), running=-1)
    assert_refused(await plane.says("/beat", message), 422, "unprocessable", "running")


async def test_unknown_and_malformed_fleet_messages_are_refused(plane):
    for path in ["/register", "/beat", "/journal"]:
        for body, status in (({"frobnicate": 1}, 422), ("{", 400), ("\xff", 400)):
            content = body.encode("latin-1") if isinstance(body, str) else msgspec.json.encode(body)
            answer = await plane.client.post(
                f"/fleet{path}", content=content, headers=worker_headers()
            )
            assert answer.status_code == status, answer.text


def signed(secret=SECRET, audience="control-plane", life_ms=60_000):
    return "Bearer " + internal_token.sign(
        secret.encode(),
        audience=audience,
        subject="rep-0",
        expires_ms=time.time_ns() // 1_000_000 + life_ms,
    )


BAD_TOKENS = {
    "none": lambda: "",
    "the admin's": lambda: f"Bearer {ADMIN_TOKEN}",
    "for a worker": lambda: signed(audience="worker"),
    "expired": lambda: signed(life_ms=-1),
    "forged": lambda: signed(secret="another secret of sixteen"),
    "garbage": lambda: "Bearer v1.control-plane.rep-0.soon.00",
    "no scheme": lambda: signed().removeprefix("Bearer "),
}


async def test_only_a_live_internal_token_for_us_opens_the_fleet_api(plane):
    for token in BAD_TOKENS.values():
        for path in ("/register", "/beat", "/journal"):
            headers = {"authorization": token()}
            answer = await plane.client.post(f"/fleet{path}", json={}, headers=headers)
            assert_refused(answer, 401, "invalid_api_key")


# Journals.


async def reserved(plane, **changes):
    """An open request of a tenant of its own."""
    tenant = await a_tenant(plane.services.postgres)
    request_id = f"req_{secrets.token_hex(8)}"
    await plane.services.ledger.reserve(a_reserve(request_id, tenant_id=tenant, **changes))
    return tenant, request_id


async def settled(plane, output=5):
    """A request settled by a gateway that saw only part of what was produced."""
    tenant, request_id = await reserved(plane, amount_micro=1_000)
    seen = an_attempt(Usage(prompt_tokens=10, output_tokens=output))
    await plane.services.ledger.settle(
        a_settle(request_id, tenant_id=tenant, attempts=(seen,), delivered_tokens=output)
    )
    return request_id


async def metered(plane, request_id):
    async with plane.services.postgres.connection() as conn:
        row = await usage.usage_of(conn, request_id)
    assert row is not None
    return row.metered_output_tokens


async def deliver(plane, worker, life, *entries):
    answer = await plane.says(
        "/journal", Journal(replica_id=worker, boot_id=life, entries=tuple(entries))
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["acked"]


async def test_a_journal_corrects_what_the_gateway_saw(plane, worker):
    request_id = await settled(plane, output=5)
    assert await deliver(plane, worker, boot(), an_entry(1, request_id)) == 1
    assert await metered(plane, request_id) == 20


async def test_the_same_message_three_times_has_one_effect(plane, worker):
    life, requests = boot(), [await settled(plane) for _ in range(3)]
    entries = [an_entry(seq, request_id) for seq, request_id in enumerate(requests, 1)]
    assert [await deliver(plane, worker, life, *entries) for _ in range(3)] == [3, 3, 3]
    assert [await metered(plane, request_id) for request_id in requests] == [20, 20, 20]
    report = (await plane.admin("GET", "/check")).json()
    assert {item["name"]: item["ok"] for item in report["items"]}["entries"]


async def test_order_does_not_matter_within_a_message_or_between_messages(plane, worker):
    life, dice = boot(), random.Random(7)
    requests = [await settled(plane) for _ in range(4)]
    progress = [
        an_entry(
            seq,
            request_id,
            final=False,
            cause="",
            usage=Usage(prompt_tokens=10, output_tokens=8),
        )
        for seq, request_id in enumerate(requests, 1)
    ]
    last_words = [an_entry(seq, request_id) for seq, request_id in enumerate(requests, 5)]
    messages = [last_words, progress, last_words[:2], progress[2:]]
    for entries in messages:
        dice.shuffle(entries)
        await deliver(plane, worker, life, *entries)
    assert [await metered(plane, request_id) for request_id in requests] == [20] * 4
    assert await deliver(plane, worker, life) == 8


async def test_the_position_comes_back_with_the_registration(plane, worker):
    life = boot()
    await plane.says("/register", a_register(replica_id=worker, boot_id=life))
    await deliver(plane, worker, life, an_entry(41, await settled(plane)))
    answer = await plane.says("/register", a_register(replica_id=worker, boot_id=life))
    assert answer.json()["journal_acked"] == 41


async def test_the_journal_of_an_older_life_is_welcome(plane, worker):
    old, request_id = boot(), await settled(plane)
    for life in (old, boot()):
        await plane.says("/register", a_register(replica_id=worker, boot_id=life))
    assert await deliver(plane, worker, old, an_entry(1, request_id, cause="lost")) == 1
    assert await metered(plane, request_id) == 20


async def test_requests_nobody_knows_are_counted_and_acknowledged(plane, worker):
    assert await deliver(plane, worker, boot(), an_entry(9, "req_unknown")) == 9
    text = plane.services.metrics.exposition().decode()
    assert 'headworks_control_plane_journal_entries_total{outcome="noted"} 1.0' in text


async def test_a_journal_heard_before_the_settlement_counts_in_it(plane, worker):
    tenant, request_id = await reserved(plane, amount_micro=1_000)
    await deliver(plane, worker, boot(), an_entry(1, request_id))
    seen = an_attempt(Usage(prompt_tokens=10, output_tokens=3))
    await plane.services.ledger.settle(
        a_settle(request_id, tenant_id=tenant, attempts=(seen,), delivered_tokens=3)
    )
    assert await metered(plane, request_id) == 20


async def test_a_long_message_goes_in_chunks_and_one_too_long_is_refused(postgres_url, valkey_url):
    settings = the_settings(postgres_url, valkey_url, journal_chunk=2, journal_entries_max=5)
    async with running(settings) as plane:
        life, worker = boot(), "rep-chunks"
        requests = [await settled(plane) for _ in range(5)]
        entries = [an_entry(seq, request_id) for seq, request_id in enumerate(requests, 1)]
        assert await deliver(plane, worker, life, *entries) == 5
        assert [await metered(plane, request_id) for request_id in requests] == [20] * 5
        six = Journal(replica_id=worker, boot_id=life, entries=(*entries, an_entry(6, "req_x")))
        answer = await plane.says("/journal", six)
        assert_refused(answer, 413, "request_too_large", "entries")


async def test_an_impossible_entry_is_refused_and_nothing_of_its_message_is_taken(plane, worker):
    life, request_id = boot(), await settled(plane)
    broken = an_entry(2, request_id, usage=Usage(prompt_tokens=1, cached_tokens=2))
    message = Journal(replica_id=worker, boot_id=life, entries=(an_entry(1, request_id), broken))
    assert_refused(await plane.says("/journal", message), 422, "unprocessable", "entries")
    assert await metered(plane, request_id) == 5
    assert await deliver(plane, worker, life) == 0


async def test_a_message_over_the_bound_in_bytes_is_refused(postgres_url, valkey_url):
    async with running(the_settings(postgres_url, valkey_url, body_bytes_max=1000)) as plane:
        answer = await plane.client.post(
            "/fleet/journal", content=b" " * 2000, headers=worker_headers()
        )
        assert_refused(answer, 413, "request_too_large")


async def test_a_boot_of_a_forgotten_replica_may_register_again(plane, worker):
    # Its row is gone (a day after it was lost) and then it wakes up.
    life = boot()
    await plane.says("/register", a_register(replica_id=worker, boot_id=life))
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("DELETE FROM replicas WHERE replica_id = %s", (worker,))
    answer = await plane.says("/beat", a_beat(replica_id=worker, boot_id=life, seq=2))
    assert answer.json()["known"] is False
    answer = await plane.says("/register", a_register(replica_id=worker, boot_id=life))
    assert answer.status_code == 200, answer.text
