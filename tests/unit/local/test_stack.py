"""A stack that fails to start or to write still stops what it has started."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from artifacts.errors import SourceAwayError
from local import stack as stack_module
from local.options import Options
from local.postgres import PostgresError
from local.process import ProcessSpec
from local.stack import DatabaseError, Stack, StopFailedError
from local.state import ProcessState
from tests.support.services import free_port

pytestmark = pytest.mark.anyio


def fail_to_pull(_stopped):
    raise SourceAwayError("no network")


def wait_to_be_stopped(stopped):
    while not stopped():
        time.sleep(0.001)
    raise SourceAwayError("cut short")


@pytest.fixture
def make_stack(tmp_path):
    def make(pull=fail_to_pull, **options):
        ports = {
            name: free_port() for name in ("gateway_port", "control_plane_port", "worker_port")
        }
        chosen = Options(data=tmp_path, redis_url="redis://elsewhere", **ports, **options)
        return Stack(chosen, {}, lambda _name, _text: None, pull)

    return make


async def a_child(stack, name):
    spec = ProcessSpec(
        name=name,
        argv=(sys.executable, "-c", "import time; time.sleep(60)"),
        cwd=Path("/"),
        env={},
    )

    async def ready():
        return True

    await stack._start(spec, ready, 5)
    return stack._running[-1]


async def test_a_full_disk_does_not_keep_anybody_running(make_stack, monkeypatch):
    stack = make_stack()
    stack._layout.make()
    children = [await a_child(stack, name) for name in ("one", "gateway")]
    pids = [child.report.pid for child in children]

    def full(_path, _state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stack_module, "write_state", full)
    await stack.down()
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_one_that_cannot_be_stopped_does_not_keep_the_others(make_stack, monkeypatch):
    stack = make_stack()
    stack._layout.make()
    first, second = [await a_child(stack, name) for name in ("first", "second")]
    stop = second.stop

    async def broken():
        await stop()
        raise RuntimeError("lost it")

    monkeypatch.setattr(second, "stop", broken)
    with pytest.raises(StopFailedError, match="second: RuntimeError"):
        await stack.down()
    assert first.report.state is ProcessState.STOPPED


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "postgresql://u:sesame@127.0.0.1:port/d",
        "postgresql://u:sesame@127.0.0.1:1/d",
        "postgresql://u:sesame@127.0.0.1:99999/d",
    ],
)
async def test_a_bad_database_url_is_named_without_its_password(make_stack, url):
    stack = make_stack(wait_to_be_stopped, database_url=url)
    with pytest.raises(DatabaseError, match="DATABASE_URL") as caught:
        await stack.up()
    assert "sesame" not in str(caught.value)
    assert "sqlalche.me" not in str(caught.value)
    await stack.down(str(caught.value))


async def test_a_failed_pull_does_not_hide_why_the_services_failed(make_stack, monkeypatch):
    def broken(_cluster):
        raise PostgresError("no room")

    monkeypatch.setattr("local.postgres.EmbeddedPostgres.prepare", broken)
    stack = make_stack()
    with pytest.RaisesGroup(PostgresError):
        await stack.up()
    await stack.down("no room")
