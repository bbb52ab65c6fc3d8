"""The served journal: what is told survives a kill, a torn tail, a full disk and a restart."""

import os
import threading
import time
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.fleet import JournalEntry
from core.protocol import Usage
from worker import journal as journal_module
from worker import journal_segments
from worker.journal import (
    RECORD_BYTES_MAX,
    Journal,
    decode_records,
    encode_record,
    left_behind,
    remove_boot,
)

ROOMY = 1 << 30


def used(output: int, prompt: int = 5) -> Usage:
    return Usage(prompt_tokens=prompt, output_tokens=output)


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch):
    # The tests say when a round of the sync thread happens.
    monkeypatch.setattr(journal_module, "SYNC_INTERVAL_S", 3600)


def no_space(*_args, **_options):
    raise OSError(28, "No space left on device")


def torn_write(file, data, *, write=os.write):
    """What a disk does that fills up within a record."""
    if len(data) <= 10:
        raise OSError(28, "No space left on device")
    return write(file, data[:10])


def told_by(directory):
    (left,) = left_behind(directory, now_ms=1)
    return {entry.request_id: entry.usage.output_tokens for entry in left.entries}


@pytest.fixture
def journal(tmp_path):
    opened = Journal(tmp_path, "boot_a", bytes_max=ROOMY)
    yield opened
    if not opened._closing.is_set():
        opened.close()


@given(
    st.lists(
        st.builds(
            JournalEntry,
            seq=st.integers(0, 2**40),
            request_id=st.text(max_size=20),
            attempt=st.integers(1, 9),
            usage=st.builds(Usage),
            final=st.booleans(),
        )
    ),
    st.data(),
)
def test_a_torn_tail_loses_only_the_torn_record(entries, data):
    records = [encode_record(entry) for entry in entries]
    whole = b"".join(records)
    cut = data.draw(st.integers(0, len(whole)))
    told = list(decode_records(whole[:cut]))
    ends = [sum(map(len, records[: i + 1])) for i in range(len(records))]
    assert told == entries[: sum(end <= cut for end in ends)]


def test_damage_ends_the_reading_rather_than_inventing_totals():
    good = encode_record(JournalEntry(seq=1, request_id="r", attempt=1, usage=used(1), final=False))
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 0x41
        assert list(decode_records(bytes(bad))) == []


@pytest.mark.parametrize("zeros", [1, 7, 8, 9, 4096])
def test_a_tail_of_zeros_ends_the_reading(zeros):
    entry = JournalEntry(seq=1, request_id="r", attempt=1, usage=used(1), final=False)
    assert list(decode_records(encode_record(entry) + bytes(zeros))) == [entry]


def test_a_whole_record_of_something_else_ends_the_reading():
    entry = JournalEntry(seq=1, request_id="r", attempt=1, usage=used(1), final=False)
    for body in (msgspec.msgpack.encode({"seq": "one"}), b"\xc1", b"x" * (RECORD_BYTES_MAX + 1)):
        foreign = len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body
        record = encode_record(entry)
        assert list(decode_records(record + foreign + record)) == [entry]


def test_only_an_attempts_newest_totals_are_delivered(journal):
    for output in range(4):
        journal.append(("r1", 1), used(output), at_ms=1)
    journal.append(("r2", 1), used(9), at_ms=1, cause="complete")
    assert [(e.request_id, e.usage.output_tokens, e.final) for e in journal.batch()] == [
        ("r1", 3, False),
        ("r2", 9, True),
    ]


def test_totals_that_moved_while_in_flight_are_delivered_again(journal):
    journal.append(("r1", 1), used(1), at_ms=1)
    in_flight = journal.batch()
    journal.append(("r1", 1), used(2), at_ms=1)
    journal.acknowledge(in_flight)
    assert [e.usage.output_tokens for e in journal.batch()] == [2]


def test_after_a_kill_open_attempts_are_lost_at_their_last_totals(tmp_path, journal):
    journal.append(("open", 1), used(7), at_ms=1)
    journal.append(("done", 2), used(3), at_ms=1, cause="complete")
    journal.append(("told", 1), used(1), at_ms=1, cause="aborted")
    told = tuple(e for e in journal.batch() if e.request_id == "told")
    journal.acknowledge(told)
    # No close: the process was killed.
    (left,) = left_behind(tmp_path, now_ms=99)
    assert left.boot_id == "boot_a"
    by_name = {entry.request_id: entry for entry in left.entries}
    assert (by_name["open"].cause, by_name["open"].usage) == ("lost", used(7))
    assert (by_name["done"].cause, by_name["done"].attempt) == ("complete", 2)
    assert by_name["open"].seq > by_name["done"].seq
    assert left_behind(tmp_path, now_ms=99) == [left]


def test_an_acknowledged_but_open_attempt_is_still_known_to_the_next_life(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_segments, "SEGMENT_BYTES", 200)
    journal = Journal(tmp_path, "boot_a", bytes_max=ROOMY)
    journal.append(("open", 1), used(7), at_ms=1)
    for number in range(50):
        journal.append((f"r{number}", 1), used(1), at_ms=1, cause="complete")
        journal.acknowledge(journal.batch())
    journal.acknowledge(journal.batch())
    (left,) = left_behind(tmp_path, now_ms=1)
    assert ("open", "lost", used(7)) in [(e.request_id, e.cause, e.usage) for e in left.entries]
    journal.close()


def test_acknowledged_segments_are_trimmed(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_segments, "SEGMENT_BYTES", 200)
    journal = Journal(tmp_path, "boot_a", bytes_max=ROOMY)
    for number in range(50):
        journal.append((f"r{number}", 1), used(1), at_ms=1, cause="complete")
    assert len(list(tmp_path.glob("*.journal"))) > 10
    journal.acknowledge(journal.batch())
    assert len(list(tmp_path.glob("*.journal"))) == 1
    journal.close()


def test_a_journal_at_its_bound_is_full_until_it_is_acknowledged(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_segments, "SEGMENT_BYTES", 200)
    journal = Journal(tmp_path, "boot_a", bytes_max=1000)
    while not journal.full:
        journal.append((f"r{journal._seq}", 1), used(1), at_ms=1, cause="complete")
    journal.acknowledge(journal.batch())
    assert not journal.full
    journal.close()


def test_a_disk_that_takes_no_more_stops_new_work_only(monkeypatch, journal):
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        assert journal.append(("r1", 1), used(1), at_ms=1) == 1
    assert journal.full
    journal.append(("r1", 1), used(2), at_ms=1, cause="complete")
    assert not journal.full


@pytest.mark.parametrize("truncates", [True, False])
def test_what_follows_a_torn_write_is_known_to_the_next_life(
    tmp_path, monkeypatch, journal, truncates
):
    journal.append(("before", 1), used(1), at_ms=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn_write)
        if not truncates:
            patch.setattr(os, "ftruncate", no_space)
        journal.append(("torn", 1), used(2), at_ms=1)
    journal.append(("after", 1), used(3), at_ms=1)
    assert journal.broken  # what was torn is not on disk yet
    assert told_by(tmp_path) == {"before": 1, "after": 3}
    journal.sync()
    assert not journal.broken
    assert told_by(tmp_path) == {"before": 1, "torn": 2, "after": 3}


def test_a_torn_segment_takes_nothing_while_no_other_can_be_opened(tmp_path, monkeypatch, journal):
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn_write)
        patch.setattr(os, "ftruncate", no_space)
        journal.append(("torn", 1), used(2), at_ms=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_space)
        journal.append(("after", 1), used(3), at_ms=1)
        journal.sync()
    assert journal.broken
    assert told_by(tmp_path) == {}
    journal.sync()
    assert not journal.broken
    assert told_by(tmp_path) == {"torn": 2, "after": 3}


def test_older_totals_are_not_written_over_newer_ones(tmp_path, monkeypatch, journal):
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        journal.append(("r1", 1), used(1), at_ms=1)
    journal.append(("r1", 1), used(2), at_ms=1)
    journal.sync()
    assert told_by(tmp_path) == {"r1": 2}


def test_a_close_writes_what_the_disk_refused_before(tmp_path, monkeypatch, journal):
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        journal.append(("r1", 1), used(1), at_ms=1, cause="complete")
    journal.close()
    assert told_by(tmp_path) == {"r1": 1}


def test_a_rotation_that_cannot_open_goes_on_in_the_old_segment(tmp_path, monkeypatch, journal):
    monkeypatch.setattr(journal_segments, "SEGMENT_BYTES", 1)
    journal.append(("r1", 1), used(1), at_ms=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_space)
        journal.append(("r2", 1), used(2), at_ms=1)
    assert not journal.broken
    assert len(list(tmp_path.glob("*.journal"))) == 1
    journal.append(("r3", 1), used(3), at_ms=1)
    assert len(list(tmp_path.glob("*.journal"))) == 2
    assert told_by(tmp_path) == {"r1": 1, "r2": 2, "r3": 3}


def test_a_new_segments_name_is_made_durable(tmp_path, monkeypatch, journal):
    monkeypatch.setattr(journal_segments, "SEGMENT_BYTES", 1)
    journal.append(("r1", 1), used(1), at_ms=1)
    synced = []

    def fsync(file, *, really=os.fsync):
        synced.append(Path(f"/proc/self/fd/{file}").resolve())
        really(file)

    monkeypatch.setattr(os, "fsync", fsync)
    journal.append(("r2", 1), used(2), at_ms=1)
    assert synced == [tmp_path, tmp_path / "boot_a.0.journal"]


def test_a_failed_sync_refuses_new_work_until_one_succeeds(monkeypatch, journal):
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        journal.append(("r1", 1), used(1), at_ms=1)
        journal.sync()
        journal.sync()
    journal.append(("r1", 1), used(2), at_ms=1)
    assert journal.full
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    journal.sync()
    assert not journal.full


def test_the_sync_thread_outlives_a_failed_sync(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SYNC_INTERVAL_S", 0.01)
    journal = Journal(tmp_path, "boot_a", bytes_max=ROOMY)
    failed = threading.Event()

    def fsync(_file):
        failed.set()
        no_space()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        journal.append(("r1", 1), used(1), at_ms=1)
        assert failed.wait(5)
    deadline = time.monotonic() + 5
    while journal.broken and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not journal.broken
    assert journal._syncer.is_alive()
    journal.close()


def test_a_rotation_that_cannot_make_the_old_segment_durable_is_told(monkeypatch, journal):
    monkeypatch.setattr(journal_segments, "SEGMENT_BYTES", 1)
    journal.append(("r1", 1), used(1), at_ms=1)
    with monkeypatch.context() as patch:
        patch.setattr(journal_segments, "sync_directory", lambda _directory: None)
        patch.setattr(os, "fsync", no_space)
        journal.append(("r2", 1), used(2), at_ms=1)
    assert journal.broken
    journal.sync()
    assert not journal.broken


def test_a_full_disk_does_not_stop_an_acknowledgement(monkeypatch, journal):
    journal.append(("r1", 1), used(1), at_ms=1, cause="complete")
    monkeypatch.setattr(Path, "write_text", no_space)
    journal.acknowledge(journal.batch())
    assert journal.batch() == ()


def test_files_that_cannot_be_deleted_stay(tmp_path, monkeypatch, journal):
    monkeypatch.setattr(journal_segments, "SEGMENT_BYTES", 1)
    journal.append(("r1", 1), used(1), at_ms=1, cause="complete")
    journal.append(("r2", 1), used(1), at_ms=1, cause="complete")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", no_space)
        journal.acknowledge(journal.batch())
        remove_boot(tmp_path, "boot_a")
    assert len(list(tmp_path.glob("*.journal"))) == 2
    journal.acknowledge(())
    assert len(list(tmp_path.glob("*.journal"))) == 1


def test_a_clean_close_with_nothing_to_tell_leaves_no_files(tmp_path, journal):
    journal.append(("r1", 1), used(1), at_ms=1, cause="complete")
    journal.acknowledge(journal.batch())
    journal.close()
    assert list(Path(tmp_path).iterdir()) == []


def test_a_clean_close_with_something_to_tell_keeps_it(tmp_path, journal):
    journal.append(("r1", 1), used(1), at_ms=1, cause="complete")
    journal.close()
    (left,) = left_behind(tmp_path, now_ms=1)
    assert [entry.request_id for entry in left.entries] == ["r1"]
    remove_boot(tmp_path, "boot_a")
    assert left_behind(tmp_path, now_ms=1) == []
