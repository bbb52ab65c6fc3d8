"""A chapter's tenants, on every kind of terms, and an operator who corrects their accounts.

Some of what bounds them is used up half-way through a chapter, so that refusals, cuts and
smaller reservations are part of the load. The operator repeats each correction until it is
answered, as whoever did not hear an answer must.
"""

import asyncio
import random

import msgspec

from core.caps import Period
from core.metering import Adjust, Adjusted, AdjustmentKind
from store.accounts import account, caps_of, set_cap, set_prepaid
from store.ledger import Ledger, LedgerAwayError
from store.postgres import Connection
from tests.support.gateway_world import Caller, World
from tests.support.kill_load import Load, told

CREDIT_MICRO = 6_000
PAUSE_S = 0.2  # about, between two corrections


class Terms(msgspec.Struct, frozen=True):
    """Micro-units for a chapter. A tenant's one key is what a cap on a key is on."""

    hard_cap_micro: int | None = None
    prepaid: bool = False
    caps: tuple[tuple[bool, Period, int], ...] = ()  # on the key or the account

    @property
    def bounded(self) -> bool:
        return self != Terms()


TERMS = (
    Terms(),
    Terms(hard_cap_micro=1_000_000),
    Terms(hard_cap_micro=12_000),
    Terms(prepaid=True),
    Terms(caps=((False, Period.MONTH, 1_000_000), (False, Period.DAY, 15_000))),
    Terms(caps=((True, Period.TOTAL, 9_000),)),
)


async def open_tenants(world: World, rng: random.Random) -> dict[Caller, Terms]:
    """One on each kind of terms, in a random order."""
    found = {}
    for terms in rng.sample(TERMS, len(TERMS)):
        caller = await world.add_caller(hard_cap_micro=terms.hard_cap_micro)
        found[caller] = terms
        async with world.postgres.transaction() as conn:
            await set_prepaid(conn, caller.tenant_id, prepaid=terms.prepaid)
            for on_key, period, micro in terms.caps:
                key_id = caller.key_id if on_key else ""
                await set_cap(
                    conn, caller.tenant_id, key_id, period, soft_micro=None, hard_micro=micro
                )
    return found


async def check_bounds(conn: Connection, tenants: dict[Caller, Terms]) -> None:
    """Nothing is ever held or posted over what bounds it: asked before any kill could matter."""
    for caller, terms in tenants.items():
        balance = await account(conn, caller.tenant_id)
        assert balance is not None
        used = balance.posted_micro + balance.reserved_micro
        assert terms.hard_cap_micro is None or used <= terms.hard_cap_micro, balance
        assert not terms.prepaid or used <= balance.credit_micro, balance
        for cap in await caps_of(conn, caller.tenant_id):
            assert cap.hard_micro is not None
            assert cap.posted_micro + cap.reserved_micro <= cap.hard_micro, cap


class Operator:
    """Credits the prepaid tenant, and refunds a little of answers that tenants have got."""

    def __init__(self, url: str, rng: random.Random, load: Load, prepaid: Caller) -> None:
        self._url = url
        self._rng = rng
        self._load = load
        self._prepaid = prepaid
        self._task: asyncio.Task[None] | None = None
        self._pausing = False
        self._number = 0
        self._answered: list[Adjust] = []

    def start(self) -> None:
        self._pausing = False
        self._task = asyncio.create_task(self._work())

    async def pause(self) -> None:
        """When the correction under way is answered."""
        self._pausing = True
        assert self._task is not None
        await self._task

    async def check(self, conn: Connection) -> None:
        """At rest: each correction that was answered has one entry, and there are no others."""
        cursor = await conn.execute(
            "SELECT adjustment_id, credit_delta_micro, posted_delta_micro FROM entries"
            " WHERE adjustment_id <> '' ORDER BY adjustment_id"
        )
        effects = [
            (word.id, word.amount_micro, 0)
            if word.kind is AdjustmentKind.CREDIT
            else (word.id, 0, -word.amount_micro)
            for word in self._answered
        ]
        assert await cursor.fetchall() == sorted(effects)

    async def _work(self) -> None:
        ledger = await Ledger.open(self._url, application_name="operator")
        try:
            while not self._pausing:
                word = self._next()
                answer = await self._done(ledger, word)
                if isinstance(answer, Adjusted):  # a refusal has no effect
                    self._answered.append(word)
                await asyncio.sleep(self._rng.uniform(0, 2 * PAUSE_S))
        finally:
            await ledger.close()

    def _next(self) -> Adjust:
        self._number += 1
        words = {"id": f"adj_{self._number:05}", "reason": "a test", "author": "operator"}
        whole = [asked for asked in self._load.asked[-50:] if told(asked) is not None]
        if not whole or self._number % 4 == 1:
            return Adjust(
                kind=AdjustmentKind.CREDIT,
                tenant_id=self._prepaid.tenant_id,
                amount_micro=CREDIT_MICRO,
                **words,
            )
        asked = self._rng.choice(whole)
        return Adjust(
            kind=AdjustmentKind.REFUND,
            tenant_id=asked.tenant_id,
            request_id=asked.request_id,
            amount_micro=self._rng.randint(1, 3),
            **words,
        )

    async def _done(self, ledger: Ledger, word: Adjust) -> object:
        while True:
            try:
                return await ledger.adjust(word)
            except LedgerAwayError:
                await asyncio.sleep(0.05)
