"""A spool's disk: ends of what was accepted always fit, and a disk that refuses costs no record."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from core.metering import AttemptTotals, RequestTimings
from core.protocol import Usage
from gateway.spool import END_BYTES, Record, Spool, SpoolError
from gateway.spool_file import framed
from store.ledger import LedgerAwayError
from tests.support.disks import files_of_at_most
from tests.support.ledger_commands import a_reserve, a_settle

pytestmark = pytest.mark.anyio

HUGE = 2**40
REQUESTS_BEFORE = 20  # accepted while the ledger was there


def an_end(name: str, attempts: int = 8) -> Record:
    """As long as they come."""
    usage = Usage(**dict.fromkeys(Usage.__struct_fields__, HUGE))
    said = [
        AttemptTotals(attempt=n, replica_id="rep_" + "f" * 24, usage=usage) for n in range(attempts)
    ]
    timings = RequestTimings(**dict.fromkeys(RequestTimings.__struct_fields__, 1234.5))
    return Record(
        settle=a_settle(
            name,
            tenant_id="ten_" + "f" * 24,
            attempts=tuple(said),
            timings=timings,
            delivered_tokens=HUGE,
            ended_ms=HUGE,
        )
    )


def a_begin(name: str) -> Record:
    return Record(reserve=a_reserve(name))


class Ledger:
    """Takes what it is told, or is away."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.away = False

    async def __call__(self, records: Sequence[Record]) -> None:
        if self.away:
            raise LedgerAwayError
        self.told += [
            ("begin " if record.reserve else "end ") + record.request_id for record in records
        ]


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(tmp_path, "gw", bytes_max=150_000)
    spool.open()
    yield spool
    asyncio.run(spool.close())


async def begin_all(spool: Spool) -> list[str]:
    """Requests until no more are taken."""
    names: list[str] = []
    while spool.takes_new_work:
        names.append(f"req_local_{len(names):028x}")
        await spool.append(a_begin(names[-1]))
    return names


def test_an_end_of_eight_attempts_takes_no_more_than_is_kept_for_it():
    assert END_BYTES / 2 < len(framed(an_end("req_local_" + "f" * 28))) < END_BYTES


async def test_the_ends_of_everything_accepted_fit_whatever_their_length(spool):
    names = await begin_all(spool)
    assert len(names) > 30
    before = [f"before_{n}" for n in range(REQUESTS_BEFORE)]
    for name in [*before, *names]:
        await spool.append(an_end(name))
        assert spool.size_bytes <= 150_000
    ledger = Ledger()
    assert await spool.replay(ledger) == 2 * len(names) + REQUESTS_BEFORE


async def test_ends_make_room_for_new_work(spool):
    names = await begin_all(spool)
    assert not spool.takes_new_work
    for name in names[:10]:
        await spool.append(an_end(name, attempts=1))
    assert spool.takes_new_work
    assert len(await begin_all(spool)) > 3


async def test_a_replay_makes_room_for_new_work(spool):
    names = await begin_all(spool)
    ledger = Ledger()
    await spool.replay(ledger)
    assert ledger.told == [f"begin {name}" for name in names]
    again = await begin_all(spool)
    assert len(again) == len(names)


async def test_words_wait_here_until_they_were_replayed(spool):
    writing = asyncio.create_task(spool.append(a_begin("one")))
    await asyncio.sleep(0)
    assert spool.holds("one"), "from the moment it is on its way"
    await writing
    ledger = Ledger()
    ledger.away = True
    with pytest.raises(LedgerAwayError):
        await spool.replay(ledger)
    await spool.append(an_end("one"))
    assert spool.holds("one")
    ledger.away = False
    await spool.replay(ledger)
    assert not spool.holds("one")
    assert ledger.told == ["begin one", "end one"]


async def test_a_disk_without_room_is_told_and_what_comes_after_is_kept(spool, tmp_path):
    await spool.append(a_begin("one"))
    spool._end_segment()
    full = tmp_path / "gw" / "00000002.spool"
    full.symlink_to("/dev/full")  # takes nothing: ENOSPC
    with pytest.raises(SpoolError, match="No space left"):
        await spool.append(a_begin("two"))
    assert not spool.holds("two")
    full.unlink()
    full.touch()
    await spool.append(an_end("one"))
    ledger = Ledger()
    assert await spool.replay(ledger) == 2
    assert ledger.told == ["begin one", "end one"]


async def test_a_disk_that_fills_up_in_the_middle_of_a_record_leaves_none_of_it(spool):
    size = len(framed(a_begin("good")))
    both = sum(len(framed(a_begin(name))) for name in ("bad", "evil"))
    places = range(1, both, size // 5)
    for more in places:
        await spool.append(a_begin("good"))
        segment = spool._path(spool._segment)
        with files_of_at_most(size + more):
            batch = [spool.append(a_begin(name)) for name in ("bad", "evil")]
            results = await asyncio.gather(*batch, return_exceptions=True)
        assert all(isinstance(result, SpoolError) for result in results)
        assert segment.stat().st_size == size
    await spool.append(an_end("good"))
    ledger = Ledger()
    await spool.replay(ledger)
    assert ledger.told == [*["begin good"] * len(places), "end good"]


def test_a_record_read_back_is_the_record():
    for record in (a_begin("one"), an_end("one")):
        body = framed(record)[8:]
        assert msgspec.msgpack.decode(body, type=Record) == record
