"""The fifteen invariants, through faults of every kind, and that each of them can fail.

`SOAK_INVARIANTS` is how many examples are tried (8 in `make test`).
"""

import asyncio
import os
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import psycopg
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from core.ledger import release
from core.metering import Reserve, Reserved
from core.money import Price
from store.accounts import account
from store.ledger import Ledger, LedgerRejectedError
from store.ledger_audit import audit
from store.postgres import Postgres, PostgresConfig
from tests.support import invariants_draws as draws
from tests.support.invariants import INVARIANTS
from tests.support.invariants_evidence import Command
from tests.support.invariants_floats import floats_in
from tests.support.invariants_planted import PLANTED
from tests.support.invariants_story import CAPS, an_adjust, prepare, tell_it
from tests.support.invariants_world import Site, Strike, World
from tests.support.ledger_commands import a_reserve, a_settle, a_top_up, a_witness
from tests.support.ledger_database import a_tenant
from tests.support.own_loop import OwnLoop

pytestmark = pytest.mark.services

Result = TypeVar("Result")

EXAMPLES = int(os.environ.get("SOAK_INVARIANTS") or 8)
# Without shrinking: when a fault strikes is the servers' choice, so a step less is another run.
PROFILE = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
ACTIONS = [
    *["reserve"] * 5,
    *["follow_up"] * 8,
    *["repeat"] * 3,
    *["at_once"] * 3,
    *["cross"] * 2,
    *["race"] * 3,
    *["operator"] * 3,
    "reuse",
    "terms",
    "sweep",
    "lease",
    "price",
    "month",
]


class InvariantsMachine(RuleBasedStateMachine):
    loop: OwnLoop
    site: Site

    def __init__(self) -> None:
        super().__init__()
        self.world = self.run(World.open(self.site, CAPS))
        self.run(prepare(self.world))
        self.said: list[Command] = []
        self.requests: list[Reserve] = []

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run(work)

    # One rule: as several, each would be left out of half the examples.
    @rule(action=st.sampled_from(ACTIONS), data=st.data())
    def one_step(self, action: str, data: st.DataObject) -> None:
        getattr(self, action)(data)
        assert self.run(self.world.check()) == {}

    def reserve(self, data: st.DataObject) -> None:
        self.say([self.a_reserve(data)], data.draw(draws.strikes()))

    def follow_up(self, data: st.DataObject) -> None:
        self.say([self.a_follow_up(data, self.a_request(data))], data.draw(draws.strikes()))

    def repeat(self, data: st.DataObject) -> None:
        """The same words once more, from whatever process."""
        if self.said:
            back = data.draw(st.integers(1, min(len(self.said), 8)))
            self.say([self.said[-back]], data.draw(draws.strikes()))

    def at_once(self, data: st.DataObject) -> None:
        """Words about different requests, which share a batch."""
        batch: dict[str, Command] = {}
        for _ in range(data.draw(st.integers(2, 4))):
            asked = self.a_request(data)
            word = data.draw(st.booleans()) and self.a_follow_up(data, asked)
            word = word or self.a_reserve(data)
            batch.setdefault(word.request_id, word)
        self.say(list(batch.values()), data.draw(draws.strikes()))

    def cross(self, data: st.DataObject) -> None:
        """Two accounts in one batch, and somebody who takes them the other way round."""
        words = [self.a_reserve(data, tenant_id=self.world.tenants[name]) for name in CAPS]
        process = data.draw(st.sampled_from(["plain", "proxied"]))
        flag = data.draw(st.booleans())
        self.say(words[:2], Strike(fault="deadlock", process=process, flag=flag))

    def race(self, data: st.DataObject) -> None:
        """An ending, a witness and whatever else, all on one request, each from elsewhere."""
        asked = self.a_request(data)
        words: list[Command] = [
            a_settle(asked.request_id, tenant_id=asked.tenant_id, **data.draw(draws.endings())),
            # A gateway's own word comes with its settlement, and never beside it.
            a_witness(asked.request_id, **data.draw(draws.testimonies("journal", "checkpoint"))),
            self.a_follow_up(data, asked, "journal", "checkpoint"),
        ]
        self.said += words
        self.run(self.world.race(words, sweeping=data.draw(st.booleans())))

    def operator(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["credit", "refund", "adjustment", "reprice"]))
        asked = self.a_request(data)
        changes: dict[str, Any] = {}
        amount = data.draw(st.integers(-60, 120))
        if kind in ("refund", "reprice"):
            changes = {"request_id": asked.request_id, "tenant_id": asked.tenant_id}
        if kind == "refund":
            amount = abs(amount) + 1
        if kind == "reprice":
            amount, changes["price_id"] = 0, data.draw(draws.prices)
        word = an_adjust(self.world, data.draw(st.sampled_from(draws.TENANTS)), kind, amount)
        self.say([msgspec.structs.replace(word, **changes)], data.draw(draws.strikes()))

    def reuse(self, data: st.DataObject) -> None:
        """Other words under an id that is taken."""
        evidence = self.world.evidence
        if evidence.reserved:
            asked = data.draw(st.sampled_from(list(evidence.reserved.values())))
            change = data.draw(
                st.sampled_from(
                    [
                        {"amount_micro": asked.amount_micro + 1},
                        {"key_id": "key_3"},
                        {"tenant_id": self.world.tenants["open"], "max_tokens": 46},
                        {"floor_micro": 0 if asked.floor_micro is None else None},
                    ]
                )
            )
            self.run(self.world.reuse(msgspec.structs.replace(asked, **change)))
        if evidence.adjusted:
            word = data.draw(st.sampled_from(list(evidence.adjusted.values())))
            self.run(self.world.reuse(msgspec.structs.replace(word, reason="another")))

    def terms(self, data: st.DataObject) -> None:
        world = self.world
        match data.draw(st.sampled_from(["hard_cap", "prepaid", "cap", "cap", "no_cap"])):
            case "hard_cap":
                self.run(world.set_hard_cap("capped", data.draw(draws.caps)))
            case "prepaid":
                self.run(world.set_prepaid("prepaid", prepaid=data.draw(st.booleans())))
            case "cap":
                place = data.draw(draws.places)
                self.run(world.set_cap("keyed", *place, data.draw(draws.caps)))
            case _:
                self.run(world.remove_cap("keyed", *data.draw(draws.places)))

    def sweep(self, data: st.DataObject) -> None:
        self.run(self.world.sweep())

    def lease(self, data: st.DataObject) -> None:
        if data.draw(st.sampled_from([True, True, False])):
            self.run(self.world.assert_lease("dying", data.draw(st.integers(1, 100))))
        else:
            self.run(self.world.retire("dying"))

    def price(self, data: st.DataObject) -> None:
        micro = data.draw(st.integers(1, 10**7))
        name = f"price_{secrets.token_hex(6)}"
        self.run(
            self.world.new_price(
                Price(id=name, input_micro=micro, cached_input_micro=micro, output_micro=micro)
            )
        )

    def month(self, data: st.DataObject) -> None:
        """A month gets its partition, and the rows that came before it are moved there."""
        self.run(self.world.make_month(data.draw(draws.ages_days)))

    def teardown(self) -> None:
        assert self.run(self.world.quiesce()) == {}

    def say(self, commands: list[Command], strike: Strike) -> None:
        self.said += commands
        self.requests += [word for word in commands if isinstance(word, Reserve)]
        assert self.run(self.world.say(commands, strike)) == {}

    def a_request(self, data: st.DataObject) -> Reserve:
        if not self.requests or data.draw(st.integers(0, 9)) == 0:
            return self.a_reserve(data)  # of which nobody has heard
        back = data.draw(st.integers(1, min(len(self.requests), 12)))
        return self.requests[-back]

    def a_reserve(self, data: st.DataObject, **changes: str) -> Reserve:
        amount = data.draw(draws.amounts)
        floor = data.draw(draws.floors)
        fields = {
            "tenant_id": self.world.tenants[data.draw(draws.tenants)],
            "gateway_id": self.world.gateway(data.draw(draws.gateways)),
            "key_id": data.draw(draws.keys),
            "price_id": data.draw(draws.prices),
            "amount_micro": amount,
            "floor_micro": None if floor is None else min(floor, amount),
            "choices": data.draw(st.sampled_from([1, 1, 2])),
        }
        request_id = self.world.request_id(data.draw(st.none() | draws.ages_days))
        return a_reserve(request_id, **(fields | changes))

    def a_follow_up(self, data: st.DataObject, asked: Reserve, *sources: str) -> Command:
        request_id, tenant = asked.request_id, asked.tenant_id
        match data.draw(st.sampled_from(["top_up", "settle", "settle", "release", "witness"])):
            case "top_up":
                total = data.draw(st.integers(0, 400))
                floor = data.draw(st.sampled_from([None, total // 2]))
                return a_top_up(request_id, tenant_id=tenant, total_micro=total, floor_micro=floor)
            case "settle":
                return a_settle(request_id, tenant_id=tenant, **data.draw(draws.endings()))
            case "release":
                return release(request_id, tenant, 2_000)
            case _:
                return a_witness(request_id, **data.draw(draws.testimonies(*sources)))


async def no_violation(site: Site) -> None:
    async with site.pg.connection() as conn:
        assert (await audit(conn)).violations == ()


def test_the_invariants_hold_through_every_fault(postgres_url):
    with OwnLoop() as loop:

        class Machine(InvariantsMachine):
            pass

        Machine.loop = loop
        Machine.site = loop.run(Site.open(postgres_url))
        try:
            run_state_machine_as_test(Machine, settings=PROFILE)
            loop.run(no_violation(Machine.site))
        finally:
            loop.run(Machine.site.close())


STRIKES = {
    "cut question": Strike(fault="cut", process="proxied", at=700),
    "cut answer": Strike(fault="cut", process="proxied", at=100, flag=True),
    "crash": Strike(fault="crash", at=2_000),
    "cancel": Strike(fault="cancel"),
    "terminate": Strike(fault="terminate"),
    "serialization failure": Strike(fault="serialize", process="serializable"),
    "deadlock of ours": Strike(fault="deadlock", flag=True),
    "deadlock of theirs": Strike(fault="deadlock"),
}


async def strike(url: str, name: str) -> dict[int, str]:
    """Reserve and settle until the fault has struck three times; what broke."""
    site = await Site.open(url)
    world = await World.open(site, CAPS)
    struck = site.saboteur.struck
    found: dict[int, str] = {}
    for n in range(60):
        words = [
            a_reserve(
                f"{world.prefix}_{tenant}_{n}",
                tenant_id=world.tenants[tenant],
                gateway_id=world.gateway("alive"),
            )
            for tenant in ("open", "keyed")
        ]
        found |= await world.say(words, STRIKES[name])
        found |= await world.say(words)  # whoever has no answer asks again
        found |= await world.say(
            [a_settle(word.request_id, tenant_id=word.tenant_id) for word in words], STRIKES[name]
        )
        found |= await world.check()
        if struck[name] >= 3:
            break
    assert struck[name] >= 3, "it does not strike"
    found |= await world.quiesce()
    await site.close()
    return found


@pytest.mark.parametrize("name", STRIKES)
def test_a_fault_strikes_and_breaks_nothing(postgres_url, name):
    assert asyncio.run(strike(postgres_url, name)) == {}


async def story(url: str, until: int | None = None) -> dict[int, str]:
    """What of the invariants breaks in the course of it, up to one that is looked for."""
    site = await Site.open(url)
    found: dict[int, str] = {}
    try:
        world = await World.open(site, CAPS)
        async for _ in tell_it(world):
            found |= await world.check()
            if until in found:
                return found
        found |= await world.quiesce()
    except (LedgerRejectedError, psycopg.Error):
        if not found:
            raise  # a ledger that falls over has not been seen to be wrong
    finally:
        await site.close()
    return found


def test_nothing_breaks_in_a_ledger_as_it_should_be(fresh_postgres_url):
    assert asyncio.run(story(fresh_postgres_url)) == {}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.what)
def test_a_planted_fault_is_seen(fresh_postgres_url, planted):
    with psycopg.connect(fresh_postgres_url, autocommit=True) as conn:
        planted.plant(conn)
    assert planted.invariant in asyncio.run(story(fresh_postgres_url, planted.invariant))


def test_every_invariant_has_a_fault_that_breaks_it():
    # 14 is that 1 to 9 hold after a fault, so whatever breaks those breaks it.
    assert {planted.invariant for planted in PLANTED} == set(INVARIANTS) - {14}


@pytest.mark.parametrize(
    "line", ["x = 0.5", "x = a / b", "x /= b", "def f(a: float): ...", "x = round(a)"]
)
def test_a_float_in_the_code_is_seen(line):
    assert floats_in(line, "module") != []


def test_milliseconds_may_be_floats():
    assert (
        floats_in("class A:\n    queue_ms: float | None = 0.5\n    b: int = a // b", "module") == []
    )


async def held(url: str, amount: int) -> tuple[int, int]:
    ledger = await Ledger.open(url)
    pg = await Postgres.open(PostgresConfig(database_url=url, application_name="test"))
    tenant = await a_tenant(pg)
    asked = a_reserve(f"{tenant}_1", tenant_id=tenant, amount_micro=amount)
    answer = await ledger.reserve(asked)
    async with pg.connection() as conn:
        found = await account(conn, tenant)
    await ledger.close()
    await pg.close()
    assert isinstance(answer, Reserved)
    assert found is not None
    return answer.reserved_micro, found.reserved_micro


@pytest.mark.parametrize("amount", [2**53 + 1, 2**62 + 1])
def test_an_amount_that_no_double_can_hold_comes_back_whole(postgres_url, amount):
    assert asyncio.run(held(postgres_url, amount)) == (amount, amount)
