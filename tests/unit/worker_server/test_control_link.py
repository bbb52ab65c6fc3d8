"""The link to a control plane that answers strangely: nothing is lost, and nothing is stuck."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from core.fleet import Capacity
from core.protocol import Usage
from worker.control_link import ControlLink, FencedError
from worker.journal import Journal, left_behind
from worker.lifecycle import Lifecycle
from worker.metrics import Metrics
from worker.server import Server
from worker.settings import WorkerSettings

pytestmark = pytest.mark.anyio

PAGE = httpx.Response(200, text="<html>Sign in</html>")


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path, "boot_b", bytes_max=1 << 30)
    yield journal
    journal.close()


def write(journal, *names):
    for tokens, name in enumerate(names, start=1):
        usage = Usage(prompt_tokens=1, output_tokens=tokens)
        journal.append((name, 1), usage, at_ms=1, cause="complete")


def a_link(journal, directory, *, left=()):
    server = Server(
        secret=b"x" * 16,
        boot_id=journal.boot_id,
        journal=journal,
        lifecycle=Lifecycle(),
        metrics=Metrics(),
        request_bytes_max=1 << 20,
    )
    settings = WorkerSettings(
        internal_secret="x" * 16,
        replica_id="r1",
        models_dir=directory,
        model_version="v",
        journal_dir=directory,
        control_plane_url="http://plane.invalid",
    )
    return ControlLink(
        settings,
        server,
        capacity=lambda: Capacity(kv_blocks=1, block_tokens=1, context_tokens=1, sequences=1),
        can_resume=True,
        left_behind=list(left),
        on_drain=lambda within_ms: None,
    )


@asynccontextmanager
async def running(link):
    task = asyncio.create_task(link.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await link.close()


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - bounded, and the link has nothing to wait on
            await asyncio.sleep(0.005)


def refused(link):
    return link._server.metrics.journal_refused._value.get()


@pytest.mark.parametrize("status", [413, 422])
async def test_a_refused_entry_is_set_aside_and_the_rest_flows(
    plane, journal, tmp_path, caplog, status
):
    def answer(_path, entries):
        bad = any(entry.request_id == "bad" for entry in entries)
        return httpx.Response(status, text="impossible") if bad else None

    plane.answer = answer
    write(journal, "a", "b", "bad", "c", "d")
    link = a_link(journal, tmp_path)
    async with running(link):
        await until(lambda: not journal.unacked)
        assert plane.told == {"a": 1, "b": 2, "c": 4, "d": 5}
        write(journal, "later")
        await until(lambda: "later" in plane.told)
    assert refused(link) == 1
    (record,) = [r for r in caplog.records if "refused a journal entry" in r.message]
    assert record.facts["request"] == "bad"
    assert record.facts["entry"]["usage"]["output_tokens"] == 3


async def test_a_batch_that_is_only_too_long_is_delivered_in_parts(plane, journal, tmp_path):
    plane.answer = lambda _path, entries: httpx.Response(413) if len(entries) > 3 else None
    names = [f"r{number}" for number in range(20)]
    write(journal, *names)
    link = a_link(journal, tmp_path)
    async with running(link):
        await until(lambda: not journal.unacked)
    assert set(plane.told) == set(names)
    assert refused(link) == 0


async def test_an_earlier_lives_refused_entry_does_not_hold_up_this_one(plane, tmp_path):
    earlier = Journal(tmp_path, "boot_a", bytes_max=1 << 30)
    write(earlier, "bad", "good")
    earlier.close()
    left = left_behind(tmp_path, now_ms=1)
    journal = Journal(tmp_path, "boot_b", bytes_max=1 << 30)
    write(journal, "new")

    def answer(_path, entries):
        bad = any(entry.request_id == "bad" for entry in entries)
        return httpx.Response(422) if bad else None

    plane.answer = answer
    async with running(a_link(journal, tmp_path, left=left)):
        await until(lambda: not journal.unacked)
    assert plane.told == {"good": 2, "new": 1}
    assert list(tmp_path.glob("boot_a.*")) == []
    journal.close()


@pytest.mark.parametrize(
    "strange", [httpx.Response(401), httpx.Response(400), httpx.Response(503), PAGE]
)
async def test_what_may_pass_is_tried_again_and_nothing_is_set_aside(
    plane, journal, tmp_path, strange
):
    plane.answer = lambda _path, _entries: strange
    write(journal, "r1")
    link = a_link(journal, tmp_path)
    async with running(link) as task:
        await until(lambda: plane.calls.count("/fleet/register") > 2)
        assert not task.done()
        plane.answer = lambda path, _entries: strange if path == "/fleet/journal" else None
        await until(lambda: plane.calls.count("/fleet/journal") > 1)
        assert journal.unacked == 1
        plane.answer = lambda _path, _entries: None
        await until(lambda: not journal.unacked)
    assert refused(link) == 0


async def test_an_error_nobody_thought_of_restarts_the_link(plane, journal, tmp_path, caplog):
    def answer(path, _entries):
        if path == "/fleet/beat" and plane.calls.count("/fleet/beat") < 3:
            raise ZeroDivisionError

    plane.answer = answer
    write(journal, "r1")
    async with running(a_link(journal, tmp_path)) as task:
        await until(lambda: plane.calls.count("/fleet/beat") > 4 and not journal.unacked)
        assert not task.done()
    assert plane.calls.count("/fleet/register") == 3
    assert "ZeroDivisionError" in caplog.text


async def test_a_full_disk_does_not_end_the_link(plane, journal, tmp_path, monkeypatch):
    def no_space(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_space)
    write(journal, "r1")
    async with running(a_link(journal, tmp_path)):
        await until(lambda: not journal.unacked)
        write(journal, "r2")
        await until(lambda: not journal.unacked)
    assert plane.calls.count("/fleet/register") == 1


@pytest.mark.parametrize("path", ["/fleet/register", "/fleet/beat", "/fleet/journal"])
async def test_a_conflict_fences(plane, journal, tmp_path, path):
    plane.answer = lambda asked, _entries: (
        httpx.Response(409, text="an older life") if asked == path else None
    )
    write(journal, "r1")
    link = a_link(journal, tmp_path)
    async with asyncio.timeout(5):
        with pytest.raises(FencedError, match="an older life"):
            await link.run()
    await link.close()


@pytest.mark.parametrize("strange", [httpx.Response(503), httpx.Response(409), PAGE])
async def test_a_goodbye_that_is_not_heard_is_no_error(plane, journal, tmp_path, strange):
    plane.answer = lambda _path, _entries: strange
    write(journal, "r1")
    await a_link(journal, tmp_path).close()
    assert journal.unacked == 1
