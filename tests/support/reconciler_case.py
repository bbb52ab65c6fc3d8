"""A reconciler that a test drives, records to plant differences in, and what it then told."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from control_plane.metrics import Metrics
from control_plane.reconciler import Reconciler
from control_plane.services import Services, open_services
from core.metering import Witness
from store.ledger import Ledger
from store.usage import usage_of
from tests.support.control_plane import the_settings
from tests.support.ledger_commands import a_reserve, a_settle, a_witness
from tests.support.ledger_database import a_tenant

PROMPTLY = {
    "reconcile_grace_ms": 0,
    "reconcile_overdue_ms": 3_600_000,
    "reconcile_revisit_ms": 0,
    "spool_patience_ms": 3_600_000,
}


class Case:
    """A control plane's services without its jobs, and its reconciler, which a test drives."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.pg = services.postgres
        self.ledger = services.ledger
        self.reconciler = Reconciler(services)

    async def rounds(self, count: int = 2) -> None:
        for _ in range(count):
            await self.reconciler.round()

    def count(self, name: str, **labels: str) -> float | None:
        return self.services.metrics.registry.get_sample_value(
            f"headworks_reconciler_{name}", labels
        )

    def told(self) -> dict[str, float]:
        """How often, by kind."""
        family = self.services.metrics.differences.collect()
        return {
            sample.labels["kind"]: sample.value
            for metric in family
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.value
        }

    async def run(self, statement: str, *parameters: Any) -> None:
        async with self.pg.transaction() as conn:
            await conn.execute(statement, parameters or None)

    async def rows(self, statement: str, *parameters: Any) -> list[Any]:
        async with self.pg.connection() as conn:
            return await (await conn.execute(statement, parameters or None)).fetchall()

    async def differences(self) -> list[Any]:
        return await self.rows(
            "SELECT kind, subject, resolution FROM differences"
            " WHERE raised_at IS NOT NULL ORDER BY id"
        )

    async def request(self, *, settled: bool = True, **changes: Any) -> tuple[str, str]:
        """Reserved, settled with 10 + 20 tokens for 50 micro-units, confirmed by its journal."""
        tenant = changes.pop("tenant_id", None) or await a_tenant(self.pg)
        request_id = f"req_{secrets.token_hex(8)}"
        fields = {"tenant_id": tenant, "amount_micro": 1_000, **changes}
        await self.ledger.reserve(a_reserve(request_id, **fields))
        if settled:
            await self.ledger.settle(a_settle(request_id, tenant_id=tenant))
            await self.ledger.reconcile(a_witness(request_id))
        return request_id, tenant

    async def usage(self, request_id: str) -> Any:
        async with self.pg.connection() as conn:
            return await usage_of(conn, request_id)

    async def entries(self, request_id: str) -> list[Any]:
        return await self.rows(
            "SELECT kind, posted_delta_micro FROM entries WHERE request_id = %s ORDER BY seq",
            request_id,
        )


@asynccontextmanager
async def a_case(postgres_url: str, valkey_url: str, **changes: Any) -> AsyncIterator[Case]:
    settings = the_settings(postgres_url, valkey_url, **(PROMPTLY | changes))
    async with open_services(settings, Metrics()) as services:
        yield Case(services)


async def killed_before_it_counted(case: Case, url: str, witness: Witness) -> None:
    """A process says `witness` and dies when it is recorded and not yet counted."""
    ledger = await Ledger.open(url, application_name="doomed")
    async with case.pg.transaction() as conn:
        await conn.execute("SELECT FROM accounts FOR UPDATE")  # the recount waits for this
        saying = asyncio.create_task(ledger.reconcile(witness))
        while not await case.rows(  # noqa: ASYNC110 - bounded by the test's own time-out
            "SELECT FROM pg_stat_activity WHERE application_name = 'doomed'"
            " AND query LIKE '%ledger_recount%' AND wait_event_type = 'Lock'"
        ):
            await asyncio.sleep(0.005)
        closing = asyncio.create_task(ledger.close())
        saying.cancel()
        await case.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'doomed'"
        )
    await asyncio.gather(saying, closing, return_exceptions=True)


async def hear(case: Case, witness: Witness) -> None:
    """As a process that dies before it counts, and quicker."""
    async with case.pg.transaction() as conn:
        await conn.execute(
            "INSERT INTO witnesses (request_id, month, attempt, source, replica_id,"
            " prompt_tokens, cached_tokens, cache_write_5m_tokens, cache_write_1h_tokens,"
            " output_tokens, reasoning_tokens, exact, final, cause, at_ms)"
            " VALUES (%s, ledger_month(%s), %s, %s, 'rep_1', %s, %s, 0, 0, %s, 0, %s, %s, %s, 1)"
            " ON CONFLICT (request_id, month, attempt, source) DO UPDATE"
            " SET output_tokens = excluded.output_tokens",
            (
                witness.request_id,
                witness.request_id,
                witness.attempt,
                witness.source,
                witness.usage.prompt_tokens,
                witness.usage.cached_tokens,
                witness.usage.output_tokens,
                witness.source == "journal" and witness.final,
                witness.final,
                witness.cause,
            ),
        )


def lines(
    caplog: pytest.LogCaptureFixture, message: str = "records differ"
) -> list[dict[str, Any]]:
    return [vars(record)["facts"] for record in caplog.records if record.getMessage() == message]
