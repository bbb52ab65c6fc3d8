"""Several processes' ledgers on one database, tenants of every kind, and what is known of them.

`World.say` gives commands, with a fault or without, and hears the answers; `World.check` reads
everything and holds the fifteen invariants against it. A `Site` is what worlds share.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from typing import Any
from urllib.parse import quote

import msgspec

from core.caps import Period
from core.metering import Adjust, LedgerRefused, Reserve, Settle, Settled, TopUp, Witness
from core.money import Price
from core.pricing import ListedPrice
from store.accounts import remove_cap, set_cap, set_hard_cap, set_prepaid
from store.leases import Sweeper, SweeperConfig, assert_lease, retire_lease
from store.ledger import Ledger, NotReservedError
from store.postgres import Postgres, PostgresConfig
from store.prices import seed_prices
from tests.support.fault_proxy import FaultProxy
from tests.support.invariants import broken, export, limits
from tests.support.invariants_evidence import Answer, Command, Evidence, Repeat, Reuse
from tests.support.invariants_faults import Saboteur
from tests.support.invariants_view import View, read_view
from tests.support.ledger_database import a_tenant
from tests.support.postgres_faults import address_of

LEASE_MS = 20
ALIVE_MS = 3_600_000
AT_EVERY_MOMENT = (1, 2)  # also while commands are under way
PROCESSES = ("plain", "serializable", "proxied")


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """What befalls commands, and where."""

    fault: str = "none"
    process: str = "plain"
    again: str = "proxied"  # the process that gives the same words, where two do
    at: int = 0  # bytes or microseconds, until it strikes
    flag: bool = False  # which of a fault's two kinds


NOTHING = Strike()


class Site:
    """One database, and the sessions that tests keep on it."""

    def __init__(self, url: str, pg: Postgres, proxy: FaultProxy, saboteur: Saboteur) -> None:
        self.url = url
        self.pg = pg
        self.proxy = proxy
        self.saboteur = saboteur
        self.ledgers: dict[str, Ledger] = {}
        self.names: dict[str, str] = {}  # of processes, as Postgres knows them
        config = SweeperConfig(contact_gap_s=1e9, grace_ms=0, lease_ms=LEASE_MS)
        self.sweeper = Sweeper(pg, config)

    @classmethod
    async def open(cls, url: str) -> "Site":
        config = PostgresConfig(database_url=url, application_name="invariants")
        pg = await Postgres.open(config)
        proxy = await FaultProxy(*address_of(url)).__aenter__()
        site = cls(url, pg, proxy, await Saboteur.open(url))
        for process in PROCESSES:
            await site.start(process)
        await site.sweeper.sweep()  # contact begins
        return site

    async def close(self) -> None:
        for ledger in self.ledgers.values():
            await ledger.close()
        await self.saboteur.close()
        await self.proxy.__aexit__()
        await self.pg.close()

    async def start(self, process: str) -> None:
        """A process with a connection to open yet, and a name of its own."""
        url = self.proxy.via(self.url) if process == "proxied" else self.url
        options = ["-c deadlock_timeout=10ms"]
        if process == "serializable":
            options.append("-c default_transaction_isolation=serializable")
        name = f"{process} {secrets.token_hex(4)}"
        self.names[process] = name
        self.ledgers[process] = await Ledger.open(
            f"{url}?options={quote(' '.join(options))}", application_name=name
        )

    async def crash(self, process: str) -> None:
        await self.saboteur.crash(self.ledgers[process], self.names[process])
        await self.start(process)


class World:
    """Tenants, requests and gateways of one example."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.evidence = Evidence()
        self.evidence.lease_us_default = LEASE_MS * 1000
        self.prefix = secrets.token_hex(6)
        self.tenants: dict[str, str] = {"nobody": f"ten_{self.prefix}_nobody"}
        self.view: View | None = None

    @classmethod
    async def open(cls, site: Site, caps: dict[str, int | None]) -> "World":
        world = cls(site)
        for name, cap in caps.items():
            world.tenants[name] = await a_tenant(site.pg, hard_cap_micro=cap)
        await world.assert_lease("alive", ALIVE_MS)
        await world.look()
        return world

    async def look(self) -> View:
        async with self.site.pg.connection() as conn:
            self.view = await read_view(conn, list(self.tenants.values()))
        return self.view

    async def check(self, *, everything: bool = False) -> dict[int, str]:
        """The invariants that do not hold now. Afterwards what was read is remembered."""
        evidence = self.evidence
        evidence.immutable_changed += await self.site.saboteur.changes_allowed(
            everything=everything
        )
        view = await self.look()
        self._note_sweeps(view)
        found = broken(view, evidence)
        self._note_limits(view)
        seen = {tenant: len(entries) for tenant, entries in view.entries.items() if entries}
        evidence.remember(view, {name: export(view, name, seq) for name, seq in seen.items()})
        return found

    async def say(self, commands: Sequence[Command], strike: Strike = NOTHING) -> dict[int, str]:
        """Give them at once; what broke while they were under way."""
        done = asyncio.Event()
        watching = asyncio.create_task(self._watch(done))
        try:
            if strike.fault == "crash":
                await self._say_and_crash(commands, strike)
            else:
                await self._say_and_hear(commands, strike)
        finally:
            done.set()
        return await watching

    async def race(self, commands: Sequence[Command], *, sweeping: bool) -> None:
        """Different words on one request at once, each from another process, and the sweeper."""
        if sweeping:
            await asyncio.sleep(1.5 * LEASE_MS / 1000)
        asked = [
            tell(self.site.ledgers[process], command)
            for process, command in zip(cycle(PROCESSES), commands, strict=False)
        ]
        swept = [self.site.sweeper.sweep()] if sweeping else []
        answers = (await asyncio.gather(*asked, *swept))[: len(commands)]
        for command, answer in zip(commands, answers, strict=True):
            self.evidence.hear(command, answer)
        # Which came last is not known.
        bills = [answer.billed_micro for answer in answers if isinstance(answer, Settled)]
        if bills:
            request_id = commands[0].request_id
            worst = self.evidence.worst_micro(request_id, (await self.look()).prices)
            least, most = (0, worst) if sweeping else (min(bills), max(bills))
            self.evidence.bills[request_id] = (least, most)

    async def reuse(self, other: Reserve | Adjust) -> None:
        """Other words under an id that is taken."""
        before = await self.look()
        answer = await tell(self.site.ledgers["plain"], other)
        after = await self.look()
        tenant = other.tenant_id
        self.evidence.reuses.append(
            Reuse(other, answer, len(before.entries[tenant]), len(after.entries[tenant]))
        )

    async def sweep(self) -> None:
        """A lease passes, and the sweeper looks for whom it has passed."""
        await asyncio.sleep(1.5 * LEASE_MS / 1000)
        await self.site.sweeper.sweep()

    async def assert_lease(self, gateway: str, lease_ms: int) -> None:
        name = self.gateway(gateway)
        async with self.site.pg.transaction() as conn:
            await assert_lease(conn, name, "local", lease_ms)
            now_us = await _now_us(conn)
        self.evidence.leases.setdefault(name, []).append((now_us, now_us + lease_ms * 1000))

    async def retire(self, gateway: str) -> None:
        name = self.gateway(gateway)
        async with self.site.pg.transaction() as conn:
            await retire_lease(conn, name)
            now_us = await _now_us(conn)
        self.evidence.leases.setdefault(name, []).append((now_us, now_us))

    async def set_hard_cap(self, tenant: str, micro: int | None) -> None:
        async with self.site.pg.transaction() as conn:
            await set_hard_cap(conn, self.tenants[tenant], micro)
        self._note_limits(await self.look())

    async def set_prepaid(self, tenant: str, *, prepaid: bool) -> None:
        async with self.site.pg.transaction() as conn:
            await set_prepaid(conn, self.tenants[tenant], prepaid=prepaid)
        self._note_limits(await self.look())

    async def set_cap(self, tenant: str, key: str, period: Period, hard: int | None) -> None:
        """With a soft cap of half of it."""
        soft = hard and hard // 2
        async with self.site.pg.transaction() as conn:
            await set_cap(conn, self.tenants[tenant], key, period, soft_micro=soft, hard_micro=hard)
        self._note_limits(await self.look())

    async def remove_cap(self, tenant: str, key: str, period: Period) -> None:
        async with self.site.pg.transaction() as conn:
            await remove_cap(conn, self.tenants[tenant], key, period)

    async def new_price(self, price: Price) -> None:
        """The model costs something else from now on."""
        moment = secrets.randbelow(2**40)
        async with self.site.pg.transaction() as conn:
            await seed_prices(conn, [ListedPrice(model="smol", effective_ms=moment, price=price)])

    async def make_month(self, age_days: int) -> None:
        async with self.site.pg.transaction() as conn:
            await conn.execute(
                "SELECT ledger_make_partitions((now() - %s * interval '1 day')::date, 1)",
                (age_days,),
            )

    def request_id(self, age_days: int | None = None) -> str:
        """A new one, made so many days ago; None: of no moment at all."""
        if age_days is None:
            return f"{self.prefix}_{secrets.token_hex(6)}"
        made_ms = time.time_ns() // 1_000_000 - age_days * 86_400_000
        return f"{self.prefix}_{made_ms:012x}{secrets.token_hex(8)}"

    async def quiesce(self) -> dict[int, str]:
        """Who has no answer asks again; then every gateway is gone, and the sweeper was there."""
        while self.evidence.in_doubt:
            await self.say([self.evidence.in_doubt[0]])
        await self.retire("alive")
        for _ in range(10):
            await self.sweep()
            view = await self.look()
            if all(row["state"] != "open" for row in view.requests.values()):
                break
        self.evidence.quiesced = True
        return await self.check(everything=True)

    def gateway(self, name: str) -> str:
        return f"gw_{self.prefix}_{name}"

    async def _watch(self, done: asyncio.Event) -> dict[int, str]:
        """The first two hold at every moment, not only between commands."""
        found: dict[int, str] = {}
        while True:
            last = done.is_set()
            async with self.site.pg.connection() as conn:
                view = await read_view(conn, list(self.tenants.values()))
            found |= broken(view, self.evidence, AT_EVERY_MOMENT)
            if last:
                return found
            await asyncio.sleep(0.005)

    async def _say_and_hear(self, commands: Sequence[Command], strike: Strike) -> None:
        processes = [strike.process]
        if strike.fault == "twice":
            processes.append(strike.again)
        async with AsyncExitStack() as trap:
            await self._lay(trap, commands, strike)
            answers = await asyncio.gather(
                *(
                    tell(self.site.ledgers[process], command)
                    for process in processes
                    for command in commands
                )
            )
        for n, command in enumerate(commands):
            mine = answers[n :: len(commands)]
            if len(mine) > 1:
                self.evidence.repeats.append(Repeat(command, mine))
            for answer in mine:
                self.evidence.hear(command, answer)
        if strike.fault not in ("none", "twice"):
            self.evidence.faults[strike.fault] += 1

    async def _lay(self, trap: AsyncExitStack, commands: Sequence[Command], strike: Strike) -> None:
        site = self.site
        saboteur, name = site.saboteur, site.names[strike.process]
        accounts = [account for command in commands if (account := self._account(command))]
        match strike.fault:
            case "cancel" | "terminate" if accounts:
                await trap.enter_async_context(saboteur.killing(strike.fault, name, accounts[0]))
            case "serialize" if accounts:
                await trap.enter_async_context(saboteur.changing(name, accounts[0]))
            case "deadlock" if len(set(accounts)) > 1:
                first, last, *_ = sorted(set(accounts))
                await trap.enter_async_context(
                    saboteur.deadlocking(name, first, last, give_way=strike.flag)
                )
            case "cut" if strike.process == "proxied":
                await trap.enter_async_context(
                    saboteur.cutting(site.proxy, after_bytes=strike.at % 2000, answer=strike.flag)
                )
            case _:
                pass

    async def _say_and_crash(self, commands: Sequence[Command], strike: Strike) -> None:
        ledger = self.site.ledgers[strike.process]
        tasks = [asyncio.create_task(tell(ledger, command)) for command in commands]
        await asyncio.sleep(strike.at % 4000 / 1e6)
        answered = [task.done() for task in tasks]
        await self.site.crash(strike.process)
        for task, command, is_answered in zip(tasks, commands, answered, strict=True):
            if is_answered:
                self.evidence.hear(command, task.result())
            else:
                task.cancel()
                self._doubt(command)
        await asyncio.gather(*tasks, return_exceptions=True)
        self.evidence.faults["crash"] += 1

    def _doubt(self, command: Command) -> None:
        assert self.view is not None
        worst = 0
        if isinstance(command, Settle | Witness):
            worst = self.evidence.worst_micro(command.request_id, self.view.prices)
        self.evidence.doubt(command, worst)

    def _account(self, command: Command) -> str:
        """Which account it locks, if it is open."""
        if isinstance(command, Witness):
            asked = self.evidence.reserved.get(command.request_id)
            return "" if asked is None else asked.tenant_id
        return "" if command.tenant_id == self.tenants["nobody"] else command.tenant_id

    def _note_sweeps(self, view: View) -> None:
        evidence = self.evidence
        for request_id, row in view.requests.items():
            is_swept = row["settled_by"] == "sweeper" and request_id not in evidence.ended
            if is_swept:
                worst = evidence.worst_micro(request_id, view.prices)
                evidence.swept(request_id, worst)

    def _note_limits(self, view: View) -> None:
        self.evidence.over = {name: total for name, limit, total in limits(view) if total > limit}


async def tell(ledger: Ledger, command: Command) -> Answer:
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


async def _now_us(conn: Any) -> int:
    row = await (await conn.execute("SELECT ledger_microseconds(now())")).fetchone()
    return int(row[0])
