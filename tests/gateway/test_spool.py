"""The spool on a real disk: what survives, in which order, and what a tear looks like."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from core.metering import RequestTimings, Settle, Witness
from core.money import EndCause
from core.protocol import Usage
from gateway.spool import Record, Spool, SpoolError
from gateway.spool_file import read_records

pytestmark = pytest.mark.anyio


def a_settle(number: int) -> Record:
    return Record(
        settle=Settle(
            request_id=f"req_{number}",
            tenant_id="ten_1",
            cause=EndCause.COMPLETE,
            attempts=(),
            delivered_tokens=number,
            timings=RequestTimings(total_ms=1.5),
            ended_ms=1,
        )
    )


def a_witness(number: int) -> Record:
    usage = Usage(output_tokens=number)
    return Record(
        witness=Witness(
            request_id="req_1", attempt=1, source="checkpoint", usage=usage, final=False
        )
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Taken:
    """What a replay handed over; fails while `away`."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.away = False

    async def __call__(self, records: Sequence[Record]) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise ConnectionError("away")
        self.records += records


def a_spool(root: Path, name: str = "gw_1", bytes_max: int = 1_000_000) -> Spool:
    spool = Spool(root, name, bytes_max=bytes_max)
    spool.open()
    return spool


async def test_records_come_back_in_order_and_leave_nothing(tmp_path: Path) -> None:
    spool, taken = a_spool(tmp_path), Taken()
    records = [a_settle(i) if i % 2 else a_witness(i) for i in range(600)]
    for start in range(0, 600, 100):
        await asyncio.gather(*(spool.append(record) for record in records[start : start + 100]))
    assert await spool.replay(taken) == 600
    assert taken.records == records
    assert spool.empty
    assert spool.size_bytes == 0
    await spool.close()
    assert names(tmp_path) == []


async def test_failed_replay_loses_nothing_and_repeats(tmp_path: Path) -> None:
    spool, taken = a_spool(tmp_path), Taken()
    await spool.append(a_settle(1))
    taken.away = True
    with pytest.raises(ConnectionError):
        await spool.replay(taken)
    await spool.append(a_settle(2))
    taken.away = False
    assert await spool.replay(taken) == 2
    assert taken.records == [a_settle(1), a_settle(2)]
    await spool.close()


async def test_appending_while_replaying_keeps_order(tmp_path: Path) -> None:
    spool, taken = a_spool(tmp_path), Taken()
    for number in range(50):
        await spool.append(a_settle(number))
    late = asyncio.gather(*(spool.append(a_settle(number)) for number in range(50, 60)))
    await spool.replay(taken)
    await late
    while not spool.empty:
        await spool.replay(taken)
    assert taken.records == [a_settle(number) for number in range(60)]
    await spool.close()


async def test_a_later_incarnation_adopts_what_a_dead_one_left(tmp_path: Path) -> None:
    dead = a_spool(tmp_path, "gw_dead")
    await dead.append(a_settle(1))
    os.close(dead._lock_file)  # as the kernel does for a killed process
    alive = a_spool(tmp_path, "gw_alive")
    await alive.append(a_settle(9))
    spool, taken = a_spool(tmp_path, "gw_new"), Taken()
    assert await spool.adopt(taken) == 1
    assert taken.records == [a_settle(1)]
    assert names(tmp_path) == ["gw_alive", "gw_new"]
    await alive.close()
    await spool.close()


# Does as `adopt` does, as fast as it can; folders that it could lock are told.
ADOPTER = """
import fcntl, os, sys
for number in range(int(sys.argv[2])):
    path = f"{sys.argv[1]}/gw_{number}/lock"
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            continue
        except BlockingIOError:
            break
        print(path)
        break
"""


async def test_a_spool_that_opens_is_never_taken_for_a_dead_one(tmp_path: Path) -> None:
    adopter = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ADOPTER, str(tmp_path), "100"), stdout=asyncio.subprocess.PIPE
    )
    await asyncio.sleep(0.1)
    spools = [a_spool(tmp_path, f"gw_{number}") for number in range(100)]
    taken, _ = await adopter.communicate()
    assert taken == b""
    for spool in spools:
        await spool.close()


async def test_a_torn_last_record_is_tolerated_at_every_byte(tmp_path: Path) -> None:
    spool = a_spool(tmp_path, "gw_dead")
    await spool.append(a_settle(1))
    whole = spool.size_bytes
    await spool.append(a_settle(2))
    os.close(spool._lock_file)
    path = tmp_path / "gw_dead" / "00000001.spool"
    data = path.read_bytes()
    for cut in range(whole, len(data)):
        path.write_bytes(data[:cut])
        assert read_records(data[:cut]) == ([a_settle(1)], whole)
    path.write_bytes(data[: whole + 20] + bytes(len(data) - whole - 20))
    adopter, taken = a_spool(tmp_path, "gw_new"), Taken()
    assert await adopter.adopt(taken) == 1
    assert taken.records == [a_settle(1)]
    assert names(tmp_path) == ["gw_new"]
    await adopter.close()


async def test_corruption_in_the_middle_is_kept_for_a_person(tmp_path: Path) -> None:
    spool, taken = a_spool(tmp_path), Taken()
    for number in range(3):
        await spool.append(a_settle(number))
    path = tmp_path / "gw_1" / "00000001.spool"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    assert await spool.replay(taken) == 1
    assert spool.empty
    assert names(tmp_path / "gw_1") == ["00000001.unreadable", "lock"]


async def test_a_full_spool_refuses_whatever_it_is(tmp_path: Path) -> None:
    spool = a_spool(tmp_path, bytes_max=2_000)
    appends = (spool.append(a_settle(1)) for _ in range(20))
    results = await asyncio.gather(*appends, return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[-1], SpoolError)
    assert not spool.takes_new_work
    assert 1_500 < spool.size_bytes <= 2_000
    taken = Taken()
    await spool.replay(taken)
    assert spool.size_bytes == 0
    await spool.append(a_settle(1))


async def test_a_disk_that_refuses_is_told_and_may_recover(tmp_path: Path) -> None:
    spool, taken = a_spool(tmp_path), Taken()
    folder = tmp_path / "gw_1"
    folder.rename(tmp_path / "gone")
    with pytest.raises(SpoolError, match="cannot be written"):
        await spool.append(a_settle(1))
    (tmp_path / "gone").rename(folder)
    await spool.append(a_settle(2))
    await spool.replay(taken)
    assert taken.records == [a_settle(2)]
    await spool.close()


async def test_a_caller_that_leaves_does_not_lose_its_record(tmp_path: Path) -> None:
    spool, taken = a_spool(tmp_path), Taken()
    leaving = asyncio.create_task(spool.append(a_settle(1)))
    await asyncio.sleep(0)
    leaving.cancel()
    await spool.append(a_settle(2))
    await spool.replay(taken)
    assert taken.records == [a_settle(1), a_settle(2)]
    await spool.close()


async def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    spool = a_spool(tmp_path)
    with pytest.raises(OSError, match="in use"):
        a_spool(tmp_path)
    await spool.close()


async def test_what_is_set_aside_outlives_the_spool_and_is_bounded(tmp_path: Path) -> None:
    spool, taken = a_spool(tmp_path, bytes_max=2_000), Taken()
    await asyncio.gather(*(spool.set_aside(a_settle(number), "why") for number in range(3)))
    more = (spool.set_aside(a_settle(number), "why") for number in range(20))
    results = await asyncio.gather(*more, return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[-1], SpoolError)
    await spool.close()
    lines = (tmp_path / "gw_1.rejected").read_text().splitlines()
    kept = [msgspec.json.decode(line) for line in lines]
    assert [line["record"]["settle"]["request_id"] for line in kept[:3]] == [
        "req_0",
        "req_1",
        "req_2",
    ]
    assert {line["reason"] for line in kept} == {"why"}
    later = a_spool(tmp_path, "gw_2")
    assert await later.adopt(taken) == 0
    assert names(tmp_path) == ["gw_1.rejected", "gw_2"]
    await later.close()
