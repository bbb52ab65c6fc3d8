"""A loop of its own for a test that is no coroutine: a state machine's rules, a property."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from store.ledger import Ledger
from store.postgres import Postgres, PostgresConfig

Result = TypeVar("Result")


class OwnLoop:
    """What is opened on it is closed on it, before it ends."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()


class LedgerDesk(OwnLoop):
    """A database and a ledger on it."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.pg, self.ledger = self.run(_open(url))

    def __exit__(self, *_: object) -> None:
        self.run(self._close())
        super().__exit__()

    async def _close(self) -> None:
        await self.ledger.close()
        await self.pg.close()


async def _open(url: str) -> tuple[Postgres, Ledger]:
    config = PostgresConfig(database_url=url, application_name="test")
    return await Postgres.open(config), await Ledger.open(url)
