"""The sums against the rows they are of: the same at every step of any history of the ledger."""

import asyncio
import contextlib
import secrets
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.metering import Adjust, RequestTimings, Reserve, Settle, TopUp, Witness
from store.ledger import BILLING_CAUSES, NotReservedError
from store.queries import load
from store.rollups import differences, freshness, rebuild, roll_up
from tests.support.ledger_database import a_tenant
from tests.support.ledger_strategies import adjustments, batches, follow_ups, reserves
from tests.support.own_loop import LedgerDesk

pytestmark = pytest.mark.services

SEPTEMBER_MS = 1_790_726_400_000  # the 30th in 2026: a day on, it is another month
HALF_HOUR_MS = 1_800_000
LATENCIES_MS = (None, 0.0004, 20.5, 33.3, 1e300)  # the last is no latency


class Shop(LedgerDesk):
    """One with two tenants' accounts of an example's own."""

    async def new_example(self) -> None:
        self.prefix = secrets.token_hex(8)
        self.tenants = {
            "a": await a_tenant(self.pg, hard_cap_micro=500),
            "b": await a_tenant(self.pg),
            "nobody": "ten_nobody",
        }

    def ours(self, command: Any) -> Any:
        """About this example's requests: half of them with ids that tell their time."""
        changes: dict[str, Any] = {}
        if hasattr(command, "tenant_id"):
            changes["tenant_id"] = self.tenants[command.tenant_id]
        if isinstance(command, Adjust):
            changes["id"] = f"{self.prefix}_{command.id}"
        if command.request_id:
            number = int(command.request_id.removeprefix("r"))
            at_ms = SEPTEMBER_MS + number * 5 * HALF_HOUR_MS
            changes["request_id"] = (
                f"req_local_{at_ms:012x}{self.prefix}" if number % 2 else f"{self.prefix}_{number}"
            )
            if isinstance(command, Reserve):
                changes["created_ms"] = at_ms
            if isinstance(command, Settle):
                latency_ms = LATENCIES_MS[command.ended_ms % len(LATENCIES_MS)]
                changes["timings"] = RequestTimings(
                    first_token_ms=latency_ms, inter_token_ms=latency_ms
                )
        return msgspec.structs.replace(command, **changes)

    async def say(self, commands: tuple[Any, ...]) -> None:
        await asyncio.gather(*(self._say(self.ours(command)) for command in commands))

    async def _say(self, command: Any) -> None:
        match command:
            case Reserve():
                await self.ledger.reserve(command)
            case TopUp():
                await self.ledger.top_up(command)
            case Settle():
                with contextlib.suppress(NotReservedError):
                    await self.ledger.settle(command)
            case Witness():
                await self.ledger.reconcile(command)
            case Adjust():
                await self.ledger.adjust(command)

    async def sweep(self, command: Any) -> None:
        async with self.pg.transaction() as conn:
            await conn.execute(
                load("leases")["expire"],
                {
                    "request_ids": [self.ours(command).request_id],
                    "billing_causes": BILLING_CAUSES,
                },
            )

    async def roll(self, entries_max: int, at_once: int) -> None:
        await asyncio.gather(
            *(roll_up(self.pg, tenants_max=2, entries_max=entries_max) for _ in range(at_once))
        )

    async def assert_sums_are_right(self) -> None:
        while (rolled := await roll_up(self.pg, entries_max=7)).entries:
            assert rolled.missing == 0
        async with self.pg.connection() as conn:
            assert (await freshness(conn)).entries_behind == 0
            for tenant in self.tenants.values():
                assert await differences(conn, tenant) == []


@st.composite
def steps(draw):
    """What happens next: words to the ledger most of the time."""
    kind = draw(st.sampled_from(["say"] * 6 + ["sweep", "roll", "roll", "check", "rebuild"]))
    if kind == "say":
        return kind, draw(
            st.one_of(
                st.tuples(st.one_of(reserves, reserves, follow_ups, adjustments)),
                batches(),
            )
        )
    if kind == "sweep":
        return kind, draw(reserves)
    return kind, (draw(st.integers(1, 6)), draw(st.integers(1, 3)))


def test_the_sums_are_the_rows_at_every_step_of_any_history(postgres_url):
    with Shop(postgres_url) as shop:

        @settings(max_examples=25)
        @given(st.lists(steps(), min_size=10, max_size=40))
        def follow(history: list[Any]) -> None:
            shop.run(shop.new_example())
            for kind, what in history:
                match kind:
                    case "say":
                        shop.run(shop.say(what))
                    case "sweep":
                        shop.run(shop.sweep(what))
                    case "roll":
                        shop.run(shop.roll(*what))
                    case "check":
                        shop.run(shop.assert_sums_are_right())
                    case "rebuild":
                        shop.run(rebuild(shop.pg, shop.tenants["a"]))
            shop.run(shop.assert_sums_are_right())

        follow()
