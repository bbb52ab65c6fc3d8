"""The lock and the state file: a live supervisor is found, a dead one leaves nothing stale."""

import fcntl
import os
import signal
import stat
import subprocess
import sys

import pytest

from local import state
from local.layout import Layout
from local.secrets import load_or_make, write_private
from local.state import (
    AlreadyRunningError,
    ProcessReport,
    ProcessState,
    StackState,
    is_running,
    read_state,
    take_lock,
    write_state,
)


@pytest.fixture
def layout(tmp_path):
    made = Layout(tmp_path)
    made.make()
    return made


def a_state(**changes):
    fields = {
        "supervisor_pid": os.getpid(),
        "phase": "up",
        "gateway_urls": ["http://127.0.0.1:8000"],
        "control_plane_url": "http://127.0.0.1:8001",
        "worker_urls": [],
        "database_url": "postgresql://secret",
        "redis_url": "redis://secret",
        "processes": {"gateway": ProcessReport(state=ProcessState.RUNNING, pid=7)},
    }
    return StackState(**fields | changes)


def test_only_one_holds_the_directory(layout, monkeypatch):
    monkeypatch.setattr(state, "TAKE_LOCK_S", 0.05)
    with take_lock(layout):
        with pytest.raises(AlreadyRunningError):
            take_lock(layout)
        assert is_running(layout)
    assert not is_running(layout)


def test_a_directory_never_used_is_not_running(tmp_path):
    assert not is_running(Layout(tmp_path / "none"))


def test_asking_at_once_does_not_look_like_running(layout):
    take_lock(layout).close()
    with layout.lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not is_running(layout)


def test_whoever_asks_does_not_keep_it_from_being_taken(layout):
    ask = "import sys; from pathlib import Path; from local.layout import Layout\n"
    ask += "from local.state import is_running\n"
    ask += "layout = Layout(Path(sys.argv[1])); print('asking', flush=True)\n"
    ask += "while True: is_running(layout)"
    with subprocess.Popen(
        [sys.executable, "-c", ask, str(layout.root)], stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout.readline() == b"asking\n"
            for _ in range(200):
                take_lock(layout).close()
        finally:
            child.kill()


def test_a_killed_holder_leaves_no_lock_and_no_state(layout):
    hold = "import sys,time; from pathlib import Path; from local.layout import Layout\n"
    hold += "from local.state import take_lock\n"
    hold += "lock = take_lock(Layout(Path(sys.argv[1]))); print('held', flush=True)\n"
    hold += "time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(layout.root)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"held\n"
        write_state(layout.state, a_state())
        assert read_state(layout) == a_state()
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert read_state(layout) is None
    take_lock(layout).close()


def test_a_killed_runs_word_is_not_its_successors(layout):
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    write_state(layout.state, a_state(supervisor_pid=child.pid))
    with take_lock(layout):
        assert read_state(layout) is None


def test_the_state_file_is_its_owners_alone(layout):
    write_state(layout.state, a_state())
    assert stat.S_IMODE(layout.state.stat().st_mode) == 0o600


def test_secrets_are_made_once_and_private(layout):
    first = load_or_make(layout)
    assert load_or_make(layout) == first
    assert layout.admin_token.read_text() == first.admin_token
    for path in (layout.secrets, layout.admin_token):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len({first.admin_token, first.internal_secret, first.key_pepper}) == 3


def test_a_private_file_is_replaced_whole(tmp_path):
    path = tmp_path / "secret"
    write_private(path, b"one")
    (tmp_path / ".secret.new").write_text("left by a kill")
    write_private(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]
