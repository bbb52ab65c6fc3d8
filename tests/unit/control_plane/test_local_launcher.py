"""Processes of this machine: one for an id, found again, and nobody else's ever touched."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import pytest

from control_plane.launchers.base import LauncherError
from control_plane.launchers.choose import ROOT, choose_launcher
from control_plane.launchers.external import ExternalLauncher
from control_plane.launchers.local import LocalConfig, LocalLauncher
from core.launch import LaunchSpec
from core.worker_spec import LauncherKind, WorkerSpec
from tests.support.control_plane import the_settings
from tests.support.launched_world import free_ports, kill_all
from tests.support.services import free_port

WAIT_S = 30
SLEEPS = ("sleep", "600")
STUBBORN = ("/bin/sh", "-c", 'trap "" TERM; echo up; while :; do sleep 0.05; done')
DIES_IN_THE_MIDDLE = """
import os, subprocess, sys, msgspec
from pathlib import Path
from control_plane.launchers import local
from core.launch import LaunchSpec
from core.worker_spec import WorkerSpec

made = subprocess.Popen

def spawn(*args, **options):
    made(*args, **options)
    os._exit(9)

local.subprocess.Popen = spawn
read = lambda kind, value: Path(value)
config = msgspec.json.decode(sys.argv[1], type=local.LocalConfig, dec_hook=read)
names = {"replica_id": "r-0", "deployment": "d", "region": "local", "version": "v"}
spec = LaunchSpec(worker=WorkerSpec(), **names)
local.LocalLauncher(config, dict(os.environ)).start(spec)
"""


def a_config(directory, **changes):
    fields = {
        "directory": directory,
        "models_dir": directory / "models",
        "command": SLEEPS,
        "cwd": ROOT,
        "host": "127.0.0.1",
        "port": free_ports(8),
        "places_max": 8,
        "control_plane_url": "http://127.0.0.1:9",
        "internal_secret": "a secret of this stack",
    }
    return LocalConfig(**(fields | changes))


def a_spec(replica_id="r-0", **changes):
    fields = {"deployment": "d", "region": "local", "version": "v1", "worker": WorkerSpec()}
    return LaunchSpec(replica_id=replica_id, **(fields | changes))


@pytest.fixture
def made():
    """Launchers of a test: whatever they have started is killed at its end."""
    launchers = []
    yield launchers
    for launcher in launchers:
        kill_all(launcher)


@pytest.fixture
def launch(tmp_path, made):
    def make(environ=None, **changes):
        given = environ if environ is not None else dict(os.environ)
        made.append(LocalLauncher(a_config(tmp_path, **changes), given))
        return made[-1]

    return make


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def place_of(launcher, replica_id="r-0"):
    return next(place for place in launcher.places() if place.replica_id == replica_id)


def pid_of(launcher, replica_id="r-0"):
    until(lambda: place_of(launcher, replica_id).pid is not None)
    return place_of(launcher, replica_id).pid


def test_a_process_is_started_found_stopped_and_forgotten(launch):
    launcher = launch()
    assert launcher.places() == ()
    launcher.start(a_spec())
    pid = pid_of(launcher)
    os.kill(pid, 0)
    launcher.stop("r-0", grace_ms=60_000)
    until(lambda: not place_of(launcher).alive)
    assert place_of(launcher).ended == "ended with -15"
    launcher.forget("r-0")
    launcher.forget("r-0")
    assert launcher.places() == ()


def test_one_that_does_not_end_is_ended_past_its_grace(launch):
    launcher = launch(command=STUBBORN)
    now_s = 100.0
    launcher._clock_s = lambda: now_s
    launcher.start(a_spec())
    pid_of(launcher)
    log = launcher._config.directory / "logs" / "r-0.log"
    until(lambda: log.read_text() == "up\n")
    launcher.stop("r-0", grace_ms=5000)
    now_s = 105.0
    launcher.stop("r-0", grace_ms=5000)
    assert place_of(launcher).alive, "it has its grace"
    now_s = 105.1
    launcher.stop("r-0", grace_ms=5000)
    until(lambda: not place_of(launcher).alive)
    assert place_of(launcher).ended == "ended with -9"


def test_two_starts_of_one_id_are_one_process(launch):
    launchers = [launch() for _ in range(2)]
    assert launchers[0].home == launchers[1].home
    launchers[0].start(a_spec())
    for launcher in launchers:
        with pytest.raises(LauncherError, match="a process for r-0 is alive"):
            launcher.start(a_spec())
    assert pid_of(launchers[0]) == pid_of(launchers[1])


def test_of_many_starts_at_once_one_is_made(launch):
    launchers = [launch() for _ in range(4)]

    def start(launcher):
        with suppress(LauncherError):
            return launcher.start(a_spec())

    with ThreadPoolExecutor(4) as threads:
        started = [place for place in threads.map(start, launchers) if place is not None]
    assert len(started) == 1


def test_a_launcher_that_comes_back_finds_what_the_one_before_has_started(launch):
    before = launch()
    before.start(a_spec())
    pid = pid_of(before)
    after = launch()
    assert (place_of(after).alive, pid_of(after)) == (True, pid)
    assert place_of(after).url == place_of(before).url
    after.stop("r-0", grace_ms=60_000)
    before._children["r-0"].wait(WAIT_S)
    assert not place_of(after).alive
    assert "not this process's child" in place_of(after).ended
    after.start(a_spec())
    assert pid_of(after) != pid


def test_a_start_that_was_killed_at_any_line_leaves_a_process_that_is_known(tmp_path, launch):
    # The launcher dies at the moment it has spawned: nothing was noted by anybody.
    config = a_config(tmp_path)
    text = msgspec.json.encode(config, enc_hook=str).decode()
    done = subprocess.run([sys.executable, "-c", DIES_IN_THE_MIDDLE, text], cwd=ROOT, check=False)
    assert done.returncode == 9
    launcher = launch(port=config.port)
    assert place_of(launcher).alive
    with pytest.raises(LauncherError, match="alive"):
        launcher.start(a_spec())
    pid_of(launcher)
    launcher.stop("r-0", grace_ms=60_000)
    until(lambda: not place_of(launcher).alive)


def test_what_a_process_leaves_behind_is_ended_too(launch):
    """A script as the command, and its worker outlives it: the id was taken for ever."""
    launcher = launch(command=("/bin/sh", "-c", "sleep 600 & echo up; wait"))
    launcher.start(a_spec())
    log = launcher._config.directory / "logs" / "r-0.log"
    until(lambda: log.read_text() == "up\n")
    os.kill(pid_of(launcher), 9)
    launcher._children["r-0"].wait(WAIT_S)
    assert place_of(launcher).alive
    launcher.stop("r-0", grace_ms=60_000)
    until(lambda: not place_of(launcher).alive)
    launcher.start(a_spec())


def test_a_pid_that_was_taken_by_somebody_else_is_not_signalled(launch):
    launcher = launch()
    launcher.start(a_spec())
    os.kill(pid_of(launcher), 9)
    until(lambda: not place_of(launcher).alive)
    with subprocess.Popen(SLEEPS) as stranger:
        (launcher._root / "r-0" / "pid").write_text(f"{stranger.pid}\n")
        for _ in range(2):
            launcher.stop("r-0", grace_ms=0)
        assert stranger.poll() is None
        assert place_of(launcher).pid is None
        stranger.kill()


@pytest.mark.parametrize("content", ["", "not a number", None])
def test_a_place_that_was_cut_short_is_a_place_where_nothing_lives(launch, content):
    launcher = launch()
    directory = launcher._root / "r-0"
    directory.mkdir()
    if content is not None:
        (directory / "pid").write_text(content)
        (directory / "place.json").write_text(content)
    assert place_of(launcher).alive is False
    launcher.stop("r-0", grace_ms=0)
    launcher.start(a_spec())
    pid_of(launcher)


def test_stacks_that_share_a_directory_do_not_see_each_other(launch):
    ours, theirs = launch(), launch(internal_secret="a secret of another stack")
    theirs.start(a_spec())
    assert ours.home != theirs.home
    assert ours.places() == ()
    ours.stop("r-0", grace_ms=0)
    assert place_of(theirs).alive


def test_each_has_a_port_of_its_own_and_the_last_is_the_bound(launch):
    port = free_port()
    launcher = launch(port=port, places_max=1)
    assert launcher.start(a_spec()).url == f"http://127.0.0.1:{port}"
    with pytest.raises(LauncherError, match=f"no port from {port} to {port} is free"):
        launcher.start(a_spec("r-1"))


def test_a_command_that_is_not_there_fails_and_says_so_in_its_log(launch, tmp_path):
    launcher = launch(command=("/no/such/program",))
    launcher.start(a_spec())
    until(lambda: not place_of(launcher).alive)
    assert place_of(launcher).ended == "ended with 127"
    assert "/no/such/program" in (tmp_path / "logs" / "r-0.log").read_text()
    broken = launch(cwd=tmp_path / "none")
    with pytest.raises(LauncherError, match="r-1 cannot be started"):
        broken.start(a_spec("r-1"))


def test_a_worker_gets_what_is_its_own_and_no_secret_of_ours(launch, tmp_path):
    environ = {
        "PATH": os.environ["PATH"],
        "DATABASE_URL": "postgresql://x",
        "HEADWORKS_DATABASE_URL": "postgresql://x",
        "HEADWORKS_ADMIN_TOKEN": "x",
        "REDIS_URL": "redis://x",
        "HTTPS_PROXY": "http://proxy",
    }
    launcher = launch(environ, command=("env",))
    launcher.start(a_spec(worker=WorkerSpec(threads=2, kv_memory_mb=64)))
    until(lambda: not place_of(launcher).alive)
    lines = (tmp_path / "logs" / "r-0.log").read_text().splitlines()
    told = dict(line.split("=", 1) for line in lines)
    assert told["HTTPS_PROXY"] == "http://proxy"
    assert told["HEADWORKS_REPLICA_ID"] == "r-0"
    assert told["HEADWORKS_JOURNAL_DIR"] == str(tmp_path / "journal" / "r-0")
    assert (told["HEADWORKS_THREADS"], told["HEADWORKS_KV_MEMORY_MB"]) == ("2", "64")
    assert not {name for name in told if "DATABASE" in name or "REDIS" in name or "ADMIN" in name}


def test_a_log_that_is_too_long_makes_room(launch, tmp_path, monkeypatch):
    monkeypatch.setattr("control_plane.launchers.local.LOG_BYTES_MAX", 3)
    launcher = launch(command=("echo", "said"))
    for _ in range(2):
        launcher.start(a_spec())
        until(lambda: not place_of(launcher).alive)
    assert (tmp_path / "logs" / "r-0.log").read_text() == "said\n"
    assert (tmp_path / "logs" / "r-0.log.1").read_text() == "said\n"


def test_without_a_directory_nobody_is_started_here(tmp_path):
    settings = the_settings("", "", control_plane_port=1234)
    launcher = choose_launcher(settings, {})
    assert isinstance(launcher, ExternalLauncher)
    assert launcher.places() == ()
    with pytest.raises(LauncherError, match="started elsewhere"):
        launcher.start(a_spec())
    launcher.stop("r-0", grace_ms=0)
    launcher.forget("r-0")
    local = choose_launcher(
        the_settings("", "", launcher_dir=str(tmp_path), launcher_command="a 'b c'"), {}
    )
    assert isinstance(local, LocalLauncher)
    assert (local.kind, local.places_max) == (LauncherKind.LOCAL, 8)
    assert local._config.command == ("a", "b c")
    assert local._config.models_dir == tmp_path / "models"
    assert local._config.control_plane_url == "http://127.0.0.1:8001"
