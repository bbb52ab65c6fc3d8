"""A lane outlives whatever goes wrong with its commands: over a real connection, with odd work."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from store.group_commit import GroupCommit, GroupCommitConfig, LedgerRejectedError
from store.postgres import Connection, PostgresConfig

pytestmark = [pytest.mark.anyio, pytest.mark.services]


class OddWork:
    """Echoes its commands; what it does with some is said by their first word."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    def key(self, command: str) -> str:
        return command

    def account(self, command: str) -> str:
        return command

    async def run(self, conn: Connection, commands: Sequence[str]) -> Sequence[str]:
        await conn.execute("SELECT 1")
        self.began.set()
        await self.go_on.wait()
        for command in commands:
            if command.startswith("raise"):
                raise KeyError(command)
            if command.startswith("break"):
                await conn.execute("SELECT 1 / 0")
        if "forget" in commands:
            return commands[1:]
        return commands

    async def free(self, conn: Connection, accounts: Sequence[str]) -> set[str]:
        await conn.execute("SELECT 1")
        return set(accounts)


@pytest.fixture
def work() -> OddWork:
    return OddWork()


@pytest.fixture
async def lane(postgres_url: str, work: OddWork) -> AsyncIterator[GroupCommit[str, str]]:
    postgres = PostgresConfig(database_url=postgres_url, application_name="odd")
    lane = GroupCommit[str, str](GroupCommitConfig(postgres=postgres, retry_pause_max_s=0.05), work)
    yield lane
    await lane.close()


@pytest.mark.parametrize("bad", ["break", "raise"])
async def test_one_bad_command_is_rejected_alone(lane: GroupCommit[str, str], bad: str) -> None:
    names = ["a", "b", f"{bad} it", "c", "d"]
    answers = await asyncio.gather(*map(lane.submit, names), return_exceptions=True)
    assert isinstance(answers.pop(2), LedgerRejectedError)
    assert answers == ["a", "b", "c", "d"]


@pytest.mark.parametrize("bad", ["break", "raise"])
async def test_a_caller_that_left_a_bad_command_harms_nobody(
    lane: GroupCommit[str, str], work: OddWork, bad: str
) -> None:
    work.go_on.clear()
    left = lane.submit(f"{bad} it")
    await work.began.wait()
    left.cancel()
    work.go_on.set()
    assert await asyncio.wait_for(lane.submit("next"), 2) == "next"
    assert not lane.away


async def test_a_lane_survives_what_nobody_expected(lane: GroupCommit[str, str]) -> None:
    with pytest.raises(LedgerRejectedError, match="ValueError"):
        await lane.submit("forget")
    assert await asyncio.wait_for(lane.submit("next"), 2) == "next"
