"""The SQL against its specification: the same words to both, the same answers and balances."""

import asyncio
import secrets
from datetime import date, timedelta
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from core.accounts import Account, Entry
from core.caps import Window
from core.ledger import Book, Expire
from core.metering import Adjust, LedgerRefused, Reserve, Reserved, Settle, TopUp, Witness
from core.money import Price, charge_micro
from core.protocol import Usage
from core.witnesses import Heard
from store.accounts import account
from store.ledger import BILLING_CAUSES, Ledger, NotReservedError
from store.ledger_audit import audit
from store.postgres import Postgres
from store.queries import load
from store.usage import usage_of
from tests.support.ledger_commands import PRICES, a_reserve
from tests.support.ledger_database import a_tenant
from tests.support.ledger_strategies import (
    HARD_CAPS,
    adjustments,
    batches,
    caps,
    caps_set,
    follow_ups,
    reserves,
    tenants,
)
from tests.support.own_loop import LedgerDesk

pytestmark = pytest.mark.services

Result = TypeVar("Result")

most_often = st.sampled_from([True] * 9 + [False])

ACTIONS = [
    *["reserve"] * 4,
    *["follow_up"] * 7,
    *["repeat"] * 2,
    *["speak_at_once"] * 3,
    "crowd",
    "sweep",
    "change_terms",
    *["set_cap"] * 2,
    "remove_cap",
    *["adjust"] * 2,
    "next_day",
]

BATCH_ORDER = (Settle, TopUp, Reserve, Witness)

# Two days from here it is another month.
FIRST_DAY = date(2026, 3, 30)

# The ledger's clock, in the test's hands.
CLOCK = """
CREATE TABLE test_today (day date NOT NULL);
INSERT INTO test_today VALUES ('2026-03-30');
CREATE OR REPLACE FUNCTION ledger_today() RETURNS date LANGUAGE sql STABLE AS $$
    SELECT day FROM test_today
$$;
"""


class AgreementMachine(RuleBasedStateMachine):
    desk: LedgerDesk

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(PRICES, today=FIRST_DAY)
        self.desk.run(execute(self.desk.pg, "UPDATE test_today SET day = %s", FIRST_DAY))
        self.prefix = secrets.token_hex(6)
        self.said: list[Any] = []
        self.names = {"nobody": "ten_nobody"}
        for tenant, cap in HARD_CAPS.items():
            self.names[tenant] = self.desk.run(a_tenant(self.desk.pg, hard_cap_micro=cap))
            self.book.open_account(self.names[tenant], cap)

    # One rule: as several, each would be left out of half the examples.
    @rule(action=st.sampled_from(ACTIONS), data=st.data())
    def one_step(self, action: str, data: st.DataObject) -> None:
        getattr(self, action)(data)

    def reserve(self, data: st.DataObject) -> None:
        self.both_answer(self.ours(data.draw(reserves), data))

    def follow_up(self, data: st.DataObject) -> None:
        """A word about a request that was accepted."""
        command = data.draw(follow_ups)
        if self.book.rows and data.draw(most_often):
            open_ones = [name for name, row in self.book.rows.items() if row.cause is None]
            among = (data.draw(st.booleans()) and open_ones) or list(self.book.rows)
            name = data.draw(st.sampled_from(among)).removeprefix(f"{self.prefix}_")
            command = msgspec.structs.replace(command, request_id=name)
        self.both_answer(self.ours(command, data))

    def repeat(self, data: st.DataObject) -> None:
        if self.said:
            back = data.draw(st.integers(1, min(len(self.said), 6)))
            self.both_answer(self.said[-back])

    def speak_at_once(self, data: st.DataObject) -> None:
        batch = tuple(self.ours(command, data) for command in data.draw(batches()))
        answers = self.desk.run(tell_all(self.desk.ledger, batch))
        # Not by tenant as well: their names are random, and what is drawn next is drawn from rows.
        order = sorted(
            range(len(batch)),
            key=lambda n: (BATCH_ORDER.index(type(batch[n])), self.turn(batch[n])),
        )
        expected = {n: say(self.book, batch[n]) for n in order}
        assert answers == [expected[n] for n in range(len(batch))]
        self.said += batch

    def crowd(self, data: st.DataObject) -> None:
        """New requests of one account, whose order decides which of them fit."""
        tenant = self.names[data.draw(tenants)]
        crowd = tuple(
            a_reserve(
                f"{self.prefix}_{secrets.token_hex(6)}", tenant_id=tenant, amount_micro=amount
            )
            for amount in data.draw(st.lists(st.integers(0, 120), min_size=2, max_size=5))
        )
        answers = self.desk.run(tell_all(self.desk.ledger, crowd))
        assert answers == [self.book.reserve(asked) for asked in crowd]

    def sweep(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([*self.book.rows, f"{self.prefix}_unknown"]))
        answer = self.book.expire(Expire(request_id=request_id, ended_ms=0))
        rows = self.desk.run(expire(self.desk.pg, request_id))
        if isinstance(answer, LedgerRefused):
            assert rows == []
        else:
            assert rows == [(answer.cause.value, answer.billed_micro)]

    def turn(self, command: Any) -> int:
        """Of the endings, those of open requests come first, and first those with one witness."""
        row = self.book.rows.get(command.request_id)
        if not isinstance(command, Settle) or row is None or row.cause is not None:
            return 2
        if row.asked.tenant_id != command.tenant_id:
            return 2
        is_heard_of = any(request_id == command.request_id for request_id, *_ in self.book.heard)
        return 1 if is_heard_of or len(command.attempts) != 1 else 0

    def change_terms(self, data: st.DataObject) -> None:
        tenant, cap, prepaid = (
            self.names[data.draw(st.sampled_from("aab"))],
            data.draw(caps),
            data.draw(st.booleans()),
        )
        self.book.set_terms(tenant, hard_cap_micro=cap, prepaid=prepaid)
        statement = "UPDATE accounts SET hard_cap_micro = %s, prepaid = %s WHERE tenant_id = %s"
        self.desk.run(execute(self.desk.pg, statement, cap, prepaid, tenant))

    def set_cap(self, data: st.DataObject) -> None:
        tenant = self.names[data.draw(st.sampled_from("ab"))]
        key, period, soft, hard = data.draw(caps_set)
        self.book.set_cap(tenant, key, period, soft_micro=soft, hard_micro=hard)
        statement = "SELECT ledger_set_cap(%s, %s, %s, %s::bigint, %s::bigint)"
        self.desk.run(execute(self.desk.pg, statement, tenant, key, period, soft, hard))

    def remove_cap(self, data: st.DataObject) -> None:
        if self.book.caps:
            # Not sorted: tenants' names are random.
            tenant, key, period = data.draw(st.sampled_from(list(self.book.caps)))
            self.book.remove_cap(tenant, key, period)
            statement = "SELECT ledger_remove_cap(%s, %s, %s)"
            self.desk.run(execute(self.desk.pg, statement, tenant, key, period))

    def adjust(self, data: st.DataObject) -> None:
        word = data.draw(adjustments)
        ended = [name for name, row in self.book.rows.items() if row.cause is not None]
        if word.request_id and ended and data.draw(most_often):
            name = data.draw(st.sampled_from(ended)).removeprefix(f"{self.prefix}_")
            word = msgspec.structs.replace(word, request_id=name)
        is_about_none = word.request_id == ""
        word = self.ours(word, data)
        if is_about_none:
            word = msgspec.structs.replace(word, request_id="")
        self.both_answer(msgspec.structs.replace(word, id=f"{self.prefix}_{word.id}"))

    def next_day(self, data: st.DataObject) -> None:
        self.book.today += timedelta(days=data.draw(st.sampled_from([1, 1, 2, 40])))
        self.desk.run(execute(self.desk.pg, "UPDATE test_today SET day = %s", self.book.today))

    def both_answer(self, command: Any) -> None:
        self.said.append(command)
        assert self.desk.run(tell(self.desk.ledger, command)) == say(self.book, command)

    @invariant()
    def balances_agree(self) -> None:
        for tenant in HARD_CAPS:
            name = self.names[tenant]
            assert self.desk.run(read_account(self.desk.pg, name)) == self.book.accounts[name]

    @invariant()
    def windows_agree(self) -> None:
        if self.book.windows:
            names = list(self.names.values())
            assert self.desk.run(read_windows(self.desk.pg, names)) == self.book.windows

    def teardown(self) -> None:
        names = list(self.names.values())
        assert self.desk.run(read_entries(self.desk.pg, names)) == sorted(
            self.book.entries, key=lambda entry: (entry.tenant_id, entry.seq)
        )
        for request_id, row in self.book.rows.items():
            found = self.desk.run(read_usage(self.desk.pg, request_id))
            asked = msgspec.structs.asdict(row.asked)
            del asked["claim"]  # no part of the row
            assert {name: getattr(found, name) for name in asked} == asked
            assert found.reserved_micro == row.reserved_micro
            assert found.state == ("open" if row.cause is None else "settled")
            assert found.cause == row.cause
            assert found.settled_by == (
                None if row.cause is None else "sweeper" if row.provisional else "gateway"
            )
            assert found.billed_micro == row.billed_micro
            assert found.adjusted_micro == row.adjusted_micro
            assert found.bill_limit_micro == row.bill_limit_micro
            assert found.accepted_tokens == row.accepted_tokens
            assert found.attempts == row.attempts
            assert found.delivered_tokens == row.delivered_tokens
            assert found.queue_ms == row.timings.queue_ms
            assert row.metered == Usage(
                prompt_tokens=found.metered_prompt_tokens,
                cached_tokens=found.metered_cached_tokens,
                cache_write_5m_tokens=found.metered_cache_write_5m_tokens,
                cache_write_1h_tokens=found.metered_cache_write_1h_tokens,
                output_tokens=found.metered_output_tokens,
                reasoning_tokens=found.metered_reasoning_tokens,
            )
            if row.cause is not None and not row.provisional:
                assert found.ended_ms == row.ended_ms
        heard = {
            key: word for key, word in self.book.heard.items() if key[0].startswith(self.prefix)
        }
        assert self.desk.run(read_heard(self.desk.pg, self.prefix)) == heard

    def ours(self, command: Any, data: st.DataObject) -> Any:
        """The command about this example's own tenants and requests."""
        changes = {"request_id": f"{self.prefix}_{command.request_id}"}
        if hasattr(command, "tenant_id"):
            changes["tenant_id"] = self.names[command.tenant_id]
            row = self.book.rows.get(changes["request_id"])
            if row is not None and data.draw(most_often):
                changes["tenant_id"] = row.asked.tenant_id
        return msgspec.structs.replace(command, **changes)


def say(book: Book, command: Any) -> Any:
    match command:
        case Reserve():
            return book.reserve(command)
        case TopUp():
            return book.top_up(command)
        case Settle():
            return book.settle(command)
        case Witness():
            return book.reconcile(command)
        case Adjust():
            return book.adjust(command)
    raise AssertionError(command)


async def tell(ledger: Ledger, command: Any) -> Any:
    match command:
        case Reserve():
            return await ledger.reserve(command)
        case TopUp():
            return await ledger.top_up(command)
        case Settle():
            try:
                return await ledger.settle(command)
            except NotReservedError:
                return LedgerRefused(reason="not_open")
        case Witness():
            return await ledger.reconcile(command)
        case Adjust():
            return await ledger.adjust(command)
    raise AssertionError(command)


async def tell_all(ledger: Ledger, batch: tuple[Any, ...]) -> list[Any]:
    return list(await asyncio.gather(*(tell(ledger, command) for command in batch)))


async def expire(pg: Postgres, request_id: str) -> list[Any]:
    async with pg.transaction() as conn:
        cursor = await conn.execute(
            load("leases")["expire"],
            {"request_ids": [request_id], "billing_causes": BILLING_CAUSES},
        )
        return await cursor.fetchall()


async def execute(pg: Postgres, statement: str, *values: Any) -> None:
    async with pg.transaction() as conn:
        await conn.execute(statement, values)


async def read_windows(pg: Postgres, tenant_ids: list[str]) -> dict[Any, Window]:
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT tenant_id, key_id, period, starts, posted_micro, reserved_micro,"
            " soft_passed_at IS NOT NULL FROM cap_windows WHERE tenant_id = ANY (%s)",
            (tenant_ids,),
        )
        return {
            row[:4]: Window(posted_micro=row[4], reserved_micro=row[5], soft_passed=row[6])
            for row in await cursor.fetchall()
        }


async def read_account(pg: Postgres, tenant_id: str) -> Account | None:
    async with pg.connection() as conn:
        return await account(conn, tenant_id)


async def read_usage(pg: Postgres, request_id: str) -> Any:
    async with pg.connection() as conn:
        return await usage_of(conn, request_id)


async def read_entries(pg: Postgres, tenant_ids: list[str]) -> list[Entry]:
    async with pg.connection() as conn:
        cursor = await conn.execute(
            f"SELECT {', '.join(Entry.__struct_fields__)} FROM entries WHERE tenant_id = ANY (%s)"
            " ORDER BY tenant_id, seq",
            (tenant_ids,),
        )
        names = Entry.__struct_fields__
        return [
            msgspec.convert(dict(zip(names, row, strict=True)), Entry)
            for row in await cursor.fetchall()
        ]


async def read_heard(pg: Postgres, prefix: str) -> dict[tuple[str, int, str], Heard]:
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT request_id, attempt, source, prompt_tokens, cached_tokens, output_tokens,"
            " exact, final, cause, replica_id, at_ms, cache_write_5m_tokens,"
            " cache_write_1h_tokens, reasoning_tokens FROM witnesses"
            " WHERE starts_with(request_id, %s)",
            (prefix,),
        )
        return {
            row[:3]: Heard(
                usage=Usage(
                    prompt_tokens=row[3],
                    cached_tokens=row[4],
                    output_tokens=row[5],
                    cache_write_5m_tokens=row[11],
                    cache_write_1h_tokens=row[12],
                    reasoning_tokens=row[13],
                ),
                exact=row[6],
                final=row[7],
                cause=row[8],
                replica_id=row[9],
                at_ms=row[10],
            )
            for row in await cursor.fetchall()
        }


async def read_audit(pg: Postgres) -> Any:
    async with pg.connection() as conn:
        return await audit(conn)


def test_the_sql_and_the_book_agree(postgres_url):
    with LedgerDesk(postgres_url) as desk:
        desk.run(execute(desk.pg, CLOCK))

        class Machine(AgreementMachine):
            pass

        Machine.desk = desk
        run_state_machine_as_test(
            Machine, settings=settings(max_examples=50, stateful_step_count=25)
        )
        report = desk.run(read_audit(desk.pg))
        # What was delivered is not drawn to agree with what was produced.
        assert report.violations == ()


async def sql_charges(pg: Postgres, price: Price, usages: list[Usage]) -> list[int]:
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT ledger_charge("
            " json_populate_record(NULL::prices, %s::json),"
            " json_populate_record(NULL::token_totals, u.word))"
            " FROM json_array_elements(%s::json) WITH ORDINALITY AS u (word, n) ORDER BY u.n",
            (
                msgspec.json.encode(price).decode(),
                msgspec.json.encode(usages).decode(),
            ),
        )
        return [charge for (charge,) in await cursor.fetchall()]


@st.composite
def prices(draw: st.DrawFn) -> Price:
    # Half a million is where rounding turns; the largest is past what a bigint could multiply.
    micro = st.one_of(st.just(500_000), st.just(499_999), st.integers(0, 10**13))
    return Price(
        id="p",
        input_micro=draw(micro),
        cached_input_micro=draw(micro),
        cache_write_5m_micro=draw(micro),
        cache_write_1h_micro=draw(micro),
        output_micro=draw(micro),
        reasoning_micro=draw(micro),
        request_micro=draw(st.integers(0, 10)),
    )


@st.composite
def large_usages(draw: st.DrawFn) -> Usage:
    parts = st.one_of(st.integers(0, 3), st.integers(0, 10**8))
    cached, write_5m, write_1h, rest, thought, shown = (draw(parts) for _ in range(6))
    return Usage(
        prompt_tokens=cached + write_5m + write_1h + rest,
        cached_tokens=cached,
        cache_write_5m_tokens=write_5m,
        cache_write_1h_tokens=write_1h,
        output_tokens=thought + shown,
        reasoning_tokens=thought,
    )


def test_both_charge_the_same_to_the_micro_unit(postgres_url):
    with LedgerDesk(postgres_url) as desk:

        @given(prices(), st.lists(large_usages(), min_size=1, max_size=20))
        def charges_agree(price: Price, usages: list[Usage]) -> None:
            expected = [charge_micro(price, usage) for usage in usages]
            assert desk.run(sql_charges(desk.pg, price, usages)) == expected

        half = Price(id="p", input_micro=500_000, cached_input_micro=0, output_micro=0)
        assert desk.run(sql_charges(desk.pg, half, [Usage(prompt_tokens=1)])) == [1]
        charges_agree()


OTHER = {"stream": False, "service_class": "batch", "floor_micro": 99}


@pytest.mark.parametrize(
    "field", [name for name in Reserve.__struct_fields__ if name not in {"request_id", "claim"}]
)
def test_a_reserve_is_the_same_only_if_every_field_is(postgres_url, field):
    with LedgerDesk(postgres_url) as desk:
        tenant = desk.run(a_tenant(desk.pg))
        asked = a_reserve(f"{tenant}_1", tenant_id=tenant)
        value = getattr(asked, field)
        other = OTHER.get(field, value + 1 if isinstance(value, int) else f"{value}_other")
        assert desk.run(tell(desk.ledger, asked)) == Reserved(reserved_micro=100)
        changed = msgspec.structs.replace(asked, **{field: other})
        assert desk.run(tell(desk.ledger, changed)) == LedgerRefused(reason="id_reused")
        assert desk.run(tell(desk.ledger, asked)) == Reserved(reserved_micro=100)
