"""Idempotency keys in the ledger's own transactions, and against their specification."""

import asyncio
import secrets
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.idempotency import Claim, Kept
from core.ledger import Book, Expire
from core.metering import LedgerRefused, Reserve, Reserved, Settle
from core.money import EndCause
from store.idempotency import KeyState, find, forget
from store.ledger import BILLING_CAUSES, Ledger
from store.ledger_audit import audit
from store.postgres import Postgres
from store.queries import load
from tests.support.ledger_commands import (
    PRICES,
    a_reserve,
    a_settle,
    a_usage,
    a_witness,
    an_attempt,
)
from tests.support.ledger_database import a_tenant
from tests.support.own_loop import LedgerDesk

pytestmark = [pytest.mark.anyio, pytest.mark.services]

SCOPE = "POST /v1/chat/completions"
BILL = 50  # of ten prompt tokens and twenty of output


def a_claim(key: str = "k", fingerprint: str = "f", **changes: Any) -> Claim:
    return Claim(scope=SCOPE, key=key, fingerprint=fingerprint, **changes)


def kept(answer: bytes = b"answer", key: str = "k") -> Kept:
    return Kept(scope=SCOPE, key=key, answer=answer)


def asked(tenant_id: str, claim: Claim | None = None, **changes: Any) -> Reserve:
    request_id = f"r_{secrets.token_hex(12)}"
    return a_reserve(request_id, tenant_id=tenant_id, claim=claim or a_claim(), **changes)


def ended(of: Reserve, cause: EndCause = EndCause.COMPLETE, **changes: Any) -> Settle:
    return a_settle(of.request_id, tenant_id=of.tenant_id, cause=cause, **changes)


async def state(pg: Postgres, tenant_id: str, key: str = "k") -> KeyState | None:
    async with pg.connection() as conn:
        return await find(conn, tenant_id=tenant_id, scope=SCOPE, key=key)


async def posted(pg: Postgres, tenant_id: str) -> tuple[int, int]:
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT posted_micro, reserved_micro FROM accounts WHERE tenant_id = %s", (tenant_id,)
        )
        row = await cursor.fetchone()
    assert row is not None
    return row[0], row[1]


async def sweep(pg: Postgres, request_id: str) -> None:
    async with pg.transaction() as conn:
        await conn.execute(
            load("leases")["expire"],
            {"request_ids": [request_id], "billing_causes": BILLING_CAUSES},
        )


async def test_of_twenty_at_two_gateways_one_has_the_key(pg: Postgres, postgres_url: str) -> None:
    tenant = await a_tenant(pg)
    ledgers = [await Ledger.open(postgres_url) for _ in range(2)]
    crowd = [asked(tenant) for _ in range(20)]
    answers = await asyncio.gather(*(ledgers[i % 2].reserve(each) for i, each in enumerate(crowd)))
    assert answers.count(Reserved(reserved_micro=100)) == 1
    assert answers.count(LedgerRefused(reason="key_open")) == 19
    assert await posted(pg, tenant) == (0, 100)
    for ledger in ledgers:
        await ledger.close()


async def test_an_answer_is_kept_as_its_request_is_settled(pg: Postgres, ledger: Ledger) -> None:
    tenant = await a_tenant(pg)
    first = asked(tenant)
    assert await state(pg, tenant) is None
    await ledger.reserve(first)
    assert await state(pg, tenant) == KeyState(fingerprint="f", answer=None, is_open=True)
    await ledger.settle(ended(first, kept=kept(b"\x00whole\xff")))
    assert await state(pg, tenant) == KeyState(
        fingerprint="f", answer=b"\x00whole\xff", is_open=False
    )
    assert await ledger.reserve(asked(tenant)) == LedgerRefused(reason="key_done")
    assert await ledger.reserve(asked(tenant, a_claim(fingerprint="g"))) == LedgerRefused(
        reason="key_reused"
    )
    assert await ledger.reserve(first) == Reserved(reserved_micro=100)  # the same words again
    assert await posted(pg, tenant) == (BILL, 0)


async def test_keys_are_their_tenant_s_and_their_path_s(pg: Postgres, ledger: Ledger) -> None:
    mine, other = await a_tenant(pg), await a_tenant(pg)
    elsewhere = Claim(scope="POST /v1/messages", key="k", fingerprint="f")
    for each in (asked(mine), asked(other), asked(mine, elsewhere), asked(mine, a_claim("k2"))):
        assert await ledger.reserve(each) == Reserved(reserved_micro=100)


async def test_one_without_an_answer_leaves_the_key_and_its_bill_goes_back(
    pg: Postgres, ledger: Ledger
) -> None:
    tenant = await a_tenant(pg)
    first, second = asked(tenant), asked(tenant)
    await ledger.reserve(first)
    await ledger.settle(ended(first, EndCause.CLIENT_CANCELLED))
    assert await posted(pg, tenant) == (BILL, 0)
    assert await ledger.reserve(second) == Reserved(reserved_micro=100)
    await ledger.settle(ended(second, kept=kept()))
    assert await posted(pg, tenant) == (BILL, 0)  # of the second alone
    # What a witness says of the first afterwards costs nothing any more.
    await ledger.reconcile(a_witness(first.request_id, usage=a_usage(10, 0, 40)))
    assert await posted(pg, tenant) == (BILL, 0)


async def test_a_key_opens_again_when_the_sweeper_ends_a_dead_gateway_s_request(
    pg: Postgres, ledger: Ledger
) -> None:
    tenant = await a_tenant(pg)
    first, second = asked(tenant), asked(tenant)
    await ledger.reserve(first)
    await ledger.reconcile(a_witness(first.request_id, source="checkpoint", final=False))
    assert await ledger.reserve(asked(tenant)) == LedgerRefused(reason="key_open")
    await sweep(pg, first.request_id)
    assert await posted(pg, tenant) == (BILL, 0)  # lost, as metered
    assert await ledger.reserve(second) == Reserved(reserved_micro=100)
    # The dead one's last words come out of its spool: too late for the key, not for the ledger.
    await ledger.settle(ended(first, kept=kept(b"the first's")))
    await ledger.settle(ended(second, kept=kept(b"the second's")))
    found = await state(pg, tenant)
    assert found is not None
    assert found.answer == b"the second's"
    assert await posted(pg, tenant) == (BILL, 0)


async def test_a_request_that_goes_on_under_another_id_keeps_its_key(
    pg: Postgres, ledger: Ledger
) -> None:
    tenant = await a_tenant(pg)
    first, second = (asked(tenant, a_claim(holder="h")) for _ in range(2))
    await ledger.reserve(first)
    assert await ledger.reserve(second) == Reserved(reserved_micro=100)
    other = asked(tenant, a_claim(holder="another"))
    assert await ledger.reserve(other) == LedgerRefused(reason="key_open")
    await ledger.settle(ended(second, kept=kept()))
    await ledger.settle(ended(first, EndCause.FAILED))
    assert await posted(pg, tenant) == (BILL, 0)


async def test_a_late_answer_is_kept_while_nobody_else_has_the_key(
    pg: Postgres, ledger: Ledger
) -> None:
    tenant = await a_tenant(pg)
    first = asked(tenant)
    await ledger.reserve(first)
    await sweep(pg, first.request_id)
    await ledger.settle(ended(first, kept=kept()))
    found = await state(pg, tenant)
    assert found is not None
    assert found.answer == b"answer"
    assert await posted(pg, tenant) == (BILL, 0)


async def test_a_claim_that_is_refused_its_money_has_no_key(pg: Postgres, ledger: Ledger) -> None:
    tenant = await a_tenant(pg, hard_cap_micro=50)
    answer = await ledger.reserve(asked(tenant))
    assert isinstance(answer, LedgerRefused)
    assert answer.reason == "hard_cap"
    assert await state(pg, tenant) is None


async def test_an_expired_key_is_free_and_forgotten_but_not_while_it_is_open(
    pg: Postgres, ledger: Ledger
) -> None:
    tenant = await a_tenant(pg)
    brief = a_claim(kept_s=0)
    first, second = asked(tenant, brief), asked(tenant, brief)
    await ledger.reserve(first)
    async with pg.transaction() as conn:
        await forget(conn, limit=100)
    assert await ledger.reserve(second) == LedgerRefused(reason="key_open")
    await ledger.settle(ended(first, kept=kept()))
    assert await state(pg, tenant) is None
    assert await ledger.reserve(second) == Reserved(reserved_micro=100)
    await ledger.settle(ended(second, kept=kept()))
    assert await posted(pg, tenant) == (2 * BILL, 0)  # two answers, both paid
    async with pg.transaction() as conn:
        assert await forget(conn, limit=100) >= 1


keys = st.sampled_from(["k1", "k1", "k2"])
claims = st.builds(
    a_claim,
    keys,
    st.sampled_from(["f", "f", "f", "g"]),
    holder=st.sampled_from(["", "h1", "h1", "h2"]),
)
causes = st.sampled_from([EndCause.COMPLETE, EndCause.CLIENT_CANCELLED, EndCause.FAILED])
steps = st.one_of(
    st.tuples(st.just("reserve"), st.one_of(st.none(), claims, claims)),
    st.tuples(st.just("settle"), st.integers(0, 9), causes, st.integers(0, 40)),
    st.tuples(st.just("sweep"), st.integers(0, 9)),
    st.tuples(st.just("witness"), st.integers(0, 9), st.integers(0, 60)),
)


@pytest.fixture(scope="module")
def desk(postgres_url: str) -> Any:
    with LedgerDesk(postgres_url) as desk:
        yield desk


@given(history=st.lists(steps, min_size=4, max_size=14), capped=st.sampled_from([None, 400]))
@settings(deadline=None, max_examples=100)
def test_sql_and_specification_agree(
    desk: LedgerDesk, history: list[Any], capped: int | None
) -> None:
    tenant = desk.run(a_tenant(desk.pg, hard_cap_micro=capped))
    book = Book(PRICES)
    book.open_account(tenant, capped)
    made: list[Reserve] = []
    for kind, *details in history:
        if kind == "reserve":
            made.append(a_reserve(f"r_{secrets.token_hex(12)}", tenant_id=tenant, claim=details[0]))
            assert desk.run(desk.ledger.reserve(made[-1])) == book.reserve(made[-1])
        elif made:
            _follow_up(desk, book, made[details[0] % len(made)], kind, details[1:])
        account = book.accounts[tenant]
        assert desk.run(posted(desk.pg, tenant)) == (account.posted_micro, account.reserved_micro)
    assert desk.run(_keys(desk.pg, tenant)) == {
        name[2]: (row.fingerprint, row.request_id, row.generation, row.superseded, row.answer)
        for name, row in book._keys.rows.items()
    }


def _follow_up(desk: LedgerDesk, book: Book, about: Reserve, kind: str, details: list[Any]) -> None:
    row = book.rows.get(about.request_id)
    if row is None:
        return
    if kind == "settle":
        cause, output = details
        attempts = (an_attempt(a_usage(10, 0, output)),)
        whole = cause is EndCause.COMPLETE and about.claim is not None
        word = ended(
            about,
            cause,
            attempts=attempts,
            delivered_tokens=0,
            kept=kept(b"%d" % output, about.claim.key) if whole and about.claim else None,
        )
        assert desk.run(desk.ledger.settle(word)) == book.settle(word)
    elif kind == "sweep":
        book.expire(Expire(request_id=about.request_id, ended_ms=0))
        desk.run(sweep(desk.pg, about.request_id))
    else:
        heard = a_witness(about.request_id, usage=a_usage(10, 0, details[0]))
        assert desk.run(desk.ledger.reconcile(heard)) == book.reconcile(heard)


async def _keys(pg: Postgres, tenant_id: str) -> dict[str, Any]:
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT key, fingerprint, request_id, generation, superseded, answer"
            " FROM idempotency_keys WHERE tenant_id = %s",
            (tenant_id,),
        )
        return {row[0]: (*row[1:4], tuple(row[4]), row[5]) for row in await cursor.fetchall()}


def test_the_books_stay_right_through_all_of_it(desk: LedgerDesk) -> None:
    async def findings() -> Any:
        async with desk.pg.connection() as conn:
            return await audit(conn)

    report = desk.run(findings())
    assert not report.violations
