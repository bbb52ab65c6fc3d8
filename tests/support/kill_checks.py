"""What must hold after a kill: at every observation, and when everything has come to rest.

The workers' journals, as their files said, and what clients saw are the evidence; the ledger is
the accused. Prices are computed here once more, from what the client was told.
"""

import asyncio
import re
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from core.money import EndCause
from core.protocol import Usage
from store.ledger_audit import audit
from store.postgres import OPERATIONAL, Connection, PostgresConfig, StoreAwayError, connect
from store.rows import struct_row
from tests.support.gateway_world import PRICE, Caller
from tests.support.kill_load import Asked, Told, check_texts, told
from tests.support.kill_stack import GATEWAYS, Stack
from tests.support.kill_steps import Attempt, Journals
from tests.support.kill_tenants import Terms, check_bounds

BACK_S = 30.0  # for Postgres to answer again
# A witness is heard in one transaction and counted in the next: a kill between them leaves the
# counting to the witness, who repeats whatever was not acknowledged.
COUNTED_LATER = "metered is what the witnesses say"
REST_S = 60.0  # for the last word about the last request
ENDING_KINDS = ("settle", "release", "expire")
WHOLE = (EndCause.COMPLETE, EndCause.LENGTH)


class Ended(msgspec.Struct, frozen=True):
    """A usage row of a request that has ended, as far as it is judged here."""

    request_id: str
    tenant_id: str
    cause: str
    settled_by: str  # gateway | sweeper
    attempts: int
    metered_prompt_tokens: int
    metered_cached_tokens: int
    metered_output_tokens: int
    delivered_tokens: int
    billed_micro: int
    bill_limit_micro: int | None


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[Connection]:
    """A connection of its own: a pool pauses before it tries again. Raises StoreAwayError."""
    config = PostgresConfig(database_url=url, application_name="kill checks")
    conn = await connect(config)
    try:
        yield conn
    except OPERATIONAL as error:
        raise StoreAwayError(str(error)) from error
    finally:
        await conn.close()


async def observe(url: str, tenants: dict[Caller, Terms], *, at_rest: bool = False) -> None:
    """The ledger's own rules and every bound, as soon as Postgres answers."""
    async with asyncio.timeout(BACK_S):
        while True:
            try:
                async with reading(url) as conn:
                    found = await audit(conn)
                    await check_bounds(conn, tenants)
            except StoreAwayError:
                await asyncio.sleep(0.02)
            else:
                break
    broken = [one for one in found.violations if at_rest or one.rule != COUNTED_LATER]
    assert not broken, broken


async def come_to_rest(stack: Stack, url: str, journals: Journals) -> None:
    """Until nothing is open, spooled, settling or undelivered. No client may be waiting."""
    because = ""
    try:
        async with asyncio.timeout(REST_S):
            while because := await _unrest(stack, url, journals):  # noqa: ASYNC110 - no such event
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"no rest within {REST_S} s: {because}") from None


async def check_all(
    url: str, journals: Journals, asked: list[Asked], tenants: dict[Caller, Terms]
) -> list[Ended]:
    """At rest: every request against every witness."""
    await observe(url, tenants, at_rest=True)
    async with reading(url) as conn:
        rows = await _rows(conn)
        _check_entries(rows, await _entries(conn))
        _check_witnesses(await _witnesses(conn), journals)
    truth = journals.by_request()
    assert truth.keys() <= rows.keys(), f"worked for nobody: {truth.keys() - rows.keys()}"
    for row in rows.values():
        _check_row(row, truth.get(row.request_id, []))
    ids = [one.request_id for one in asked if one.request_id]
    assert len(set(ids)) == len(ids), "two requests were told one id"
    bounded = {caller.tenant_id for caller, terms in tenants.items() if terms.bounded}
    for one in asked:
        _check_client(one, rows.get(one.request_id), is_bounded=one.tenant_id in bounded)
    return list(rows.values())


async def _unrest(stack: Stack, url: str, journals: Journals) -> str:
    """What is still under way; nothing at rest."""
    stack.revive()
    dead = stack.spool.glob("*/*.spool")
    if spooled := [str(path) for path in dead]:
        return f"spooled: {spooled}"
    for name in GATEWAYS:
        if busy := await asyncio.to_thread(_busy, stack.ports[name]):
            return f"{name}: {busy}"
    journals.read_on()
    try:
        async with reading(url) as conn:
            cursor = await conn.execute("SELECT request_id, gateway_id FROM reservations")
            if held := await cursor.fetchall():
                return f"held: {held}"
            untold = journals.newest.keys() - (await _witnesses(conn)).keys()
            uncounted = [x for x in (await audit(conn)).violations if x.rule == COUNTED_LATER]
    except StoreAwayError as error:
        return str(error)
    if untold:
        return f"untold: {[journals.newest[key] for key in untold][:10]}"
    return f"uncounted: {uncounted}" if uncounted else ""


def _busy(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
            text = answer.read().decode()
    except OSError as error:
        return str(error)
    names = ("open_requests", "settling", "spool_bytes", "ledger_away")
    values = {
        name: float(re.findall(rf"^headworks_gateway_{name} (\S+)$", text, re.MULTILINE)[0])
        for name in names
    }
    return str(values) if any(values.values()) else ""


async def _rows(conn: Connection) -> dict[str, Ended]:
    columns = ", ".join(Ended.__struct_fields__)
    async with conn.cursor(row_factory=struct_row(Ended)) as cursor:
        await cursor.execute(f"SELECT {columns} FROM usage")
        found = await cursor.fetchall()
    rows = {row.request_id: row for row in found}
    assert len(rows) == len(found), "one usage row for each request"
    return rows


async def _entries(conn: Connection) -> dict[str, Counter[str]]:
    cursor = await conn.execute(
        "SELECT request_id, kind, count(*) FROM entries WHERE request_id <> '' GROUP BY 1, 2"
    )
    kinds: dict[str, Counter[str]] = {}
    for request_id, kind, count in await cursor.fetchall():
        kinds.setdefault(request_id, Counter())[kind] = count
    return kinds


async def _witnesses(conn: Connection) -> dict[Attempt, Usage]:
    """The last words of journals, as the ledger has heard them."""
    cursor = await conn.execute(
        "SELECT request_id, attempt, prompt_tokens, cached_tokens, output_tokens"
        " FROM witnesses WHERE source = 'journal' AND final"
    )
    return {
        (request_id, attempt): Usage(
            prompt_tokens=prompt, cached_tokens=cached, output_tokens=output
        )
        for request_id, attempt, prompt, cached, output in await cursor.fetchall()
    }


def _check_entries(rows: dict[str, Ended], entries: dict[str, Counter[str]]) -> None:
    """Each step took effect once, and nothing has entries without a row."""
    assert entries.keys() == rows.keys()
    for request_id in rows:
        kinds = entries[request_id]
        endings = sum(kinds[kind] for kind in ENDING_KINDS)
        assert (kinds["reserve"], endings) == (1, 1), (request_id, kinds)


def _check_witnesses(heard: dict[Attempt, Usage], journals: Journals) -> None:
    """The ledger heard exactly what stood in the files, of every attempt."""
    truth = {attempt: entry.usage for attempt, entry in journals.newest.items()}
    assert heard == truth, {key for key in heard.keys() | truth if heard.get(key) != truth.get(key)}


def _check_row(row: Ended, truth: list[Usage]) -> None:
    """Of attempts output adds up; the prompt counts once, where most was read and most cached."""
    assert row.cause in set(EndCause), row
    output = sum(usage.output_tokens for usage in truth)
    prompt = max(((usage.prompt_tokens, usage.cached_tokens) for usage in truth), default=(0, 0))
    assert row.metered_output_tokens == output, (row, truth)
    assert (row.metered_prompt_tokens, row.metered_cached_tokens) == prompt, (row, truth)
    assert row.delivered_tokens <= row.metered_output_tokens, row


def _check_client(asked: Asked, row: Ended | None, *, is_bounded: bool) -> None:
    """What the client saw agrees with what it was billed."""
    if asked.status == 200:
        assert row is not None, f"served and not in the books: {asked}"
    if row is None:
        return
    assert row.tenant_id == asked.tenant_id, (asked, row)
    answer = told(asked)
    if answer is not None:
        check_texts(asked, answer, may_be_short=is_bounded)
        _check_bill(asked, answer, row)
    elif asked.status >= 400 and row.settled_by == "gateway":
        assert row.billed_micro == 0, (asked, row)


def _check_bill(asked: Asked, answer: Told, row: Ended) -> None:
    """An answer that came whole costs its tokens, once.

    When its gateway died before it could say so, the bill is by what the engines produced:
    the same but for tokens that were produced again after a replica died.
    """
    assert answer.output_tokens <= row.metered_output_tokens, (asked, row)
    if row.settled_by == "gateway":
        assert row.cause in WHOLE, (asked, row)
        assert row.delivered_tokens == answer.output_tokens, (asked, row)
    elif row.attempts > 1:
        return
    cached = row.metered_cached_tokens if answer.cached_tokens is None else answer.cached_tokens
    due = cost_micro(answer.prompt_tokens, cached, answer.output_tokens)
    if row.bill_limit_micro is not None:
        due = min(due, row.bill_limit_micro)
    assert row.billed_micro == due, (due, asked, row)


def cost_micro(prompt: int, cached: int, output: int) -> int:
    """By `PRICE`, whose rates are whole micro-units for two tokens: half up."""
    assert (PRICE.input_micro, PRICE.cached_input_micro, PRICE.output_micro) == (
        1_000_000,
        500_000,
        4_000_000,
    )
    return (2 * (prompt - cached) + cached + 8 * output + 1) // 2
