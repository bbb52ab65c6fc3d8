"""A whole system to be killed, process by process: Postgres, control plane, gateways, workers.

Real processes on real sockets, forked from a zygote so that a restart takes milliseconds. All
addresses stay the same over restarts; a chapter is a fresh database with fresh directories.
"""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.settings import env_name
from store.migrate import upgrade
from tests.support.gateway_world import DEPLOYMENT, PEPPER, SECRET, tiny_store
from tests.support.kill_zygote import Zygote, is_alive
from tests.support.services import PostgresServer, ValkeyServer, free_port, open_directory
from worker.process import EXIT_FENCED

GATEWAYS = ("gateway-0", "gateway-1")
WORKERS = ("worker-0", "worker-1")
CONTROL_PLANE = "control-plane"
PROCESSES = (CONTROL_PLANE, *WORKERS, *GATEWAYS)

LEASE_MS = 600
TEMPLATE = "migrated"
GONE_S = 10.0

# Short, so that what takes a lease, a poll or a pause ends soon; the rest is as it ships.
_SHARED = {"lease_ms": LEASE_MS, "log_level": "WARNING", "internal_secret": SECRET}
_GATEWAY = {
    "poll_ms": 100,
    "checkpoint_ms": 150,
    "reserve_output_tokens": 8,
    "unsent_ms": 2_000,
    "no_replica_ms": 1_500,
    "worker_connect_ms": 500,
}
# Room enough: a dead gateway's tickets hold theirs at the dispatcher for five seconds.
_WORKER = {"kv_blocks": 2_048, "max_sequences": 64, "deployment": DEPLOYMENT, "threads": 1}
_CONTROL_PLANE = {
    "admin_token": "an admin token for tests",
    "beat_interval_ms": 200,
    "replica_lost_ms": 2_000,
    "backoff_max_ms": 300,
}


class Stack:
    """The processes of one chapter at a time."""

    def __init__(self, root: Path, postgres: PostgresServer, valkey: ValkeyServer) -> None:
        self.root = root
        self.postgres = postgres
        self.valkey = valkey
        self.manifest = tiny_store()[1]
        self.ports = {name: free_port() for name in PROCESSES}
        self._held_ports = [hold_port(port) for port in self.ports.values()]
        self.directory = root
        self.database_url = ""
        self.fenced = 0
        self._zygote = Zygote()
        self._pids: dict[str, int] = {}

    def open_chapter(self, number: int) -> None:
        """A fresh database and fresh directories; nothing runs yet."""
        name = f"chapter_{number}"
        self.database_url = self.postgres.create_database(name, TEMPLATE)
        self.directory = self.root / name
        self.directory.mkdir()

    def close_chapter(self, number: int) -> None:
        """Kill whatever runs and drop the database."""
        for name in list(self._pids):
            self.kill(name)
        self.postgres.drop_database(f"chapter_{number}")

    def close(self) -> None:
        self._zygote.close()
        for held in self._held_ports:
            held.close()

    @property
    def spool(self) -> Path:
        return self.directory / "spool"

    def journal(self, worker: str) -> Path:
        return self.directory / f"journal-{worker}"

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def start(self, name: str) -> None:
        assert name not in self._pids
        kind = name.rpartition("-")[0] if name != CONTROL_PLANE else "control_plane"
        self._pids[name] = self._zygote.start(kind, self._environ(name), self.log(name))

    def stop_clock(self, name: str) -> None:
        """It does nothing more; what it has handed to the kernel goes on."""
        os.kill(self._pids[name], signal.SIGSTOP)

    def kill(self, name: str) -> None:
        pid = self._pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        self._zygote.reap(pid)

    def started(self) -> list[str]:
        """The processes that were started and not killed."""
        return list(self._pids)

    def revive(self) -> None:
        """Start again, as a supervisor does, workers that were fenced; nothing else may end.

        A registration that hung while Postgres was away may be done after its worker was
        killed, and after the next life's own: that one is then taken for the older.
        """
        ended = [name for name, pid in self._pids.items() if not is_alive(pid)]
        for name in ended:
            status = self._zygote.reap(self._pids.pop(name))
            assert (name in WORKERS, status) == (True, EXIT_FENCED), f"{name} ended with {status}"
            self.start(name)
            self.fenced += 1

    def listens(self, name: str) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.ports[name]), 0.2).close()
        except OSError:
            return False
        return True

    def kill_postgres(self) -> None:
        """The server and every session, between two instructions."""
        postmaster = self.postgres.running.pid
        os.kill(postmaster, signal.SIGSTOP)  # forks no more
        sessions = children(postmaster)
        for pid in sessions:
            os.kill(pid, signal.SIGKILL)
        self.postgres.running.kill()
        wait_gone(sessions)

    def busy_session(self) -> int | None:
        """A session of this chapter's that is in the middle of a statement."""
        database = self.database_url.rsplit("/", 1)[1]
        for pid in children(self.postgres.running.pid):
            title = command_line(pid)
            if database in title and not title.rstrip("\0 ").endswith("idle"):
                return pid
        return None

    def _environ(self, name: str) -> dict[str, str]:
        values: dict[str, object] = {**_SHARED, "models_dir": tiny_store()[0].root}
        stores = {
            "database_url": self.database_url,
            "redis_url": self.valkey.embedded.url,
            "key_pepper": PEPPER,
        }
        if name == CONTROL_PLANE:
            values |= {**_CONTROL_PLANE, **stores, "control_plane_port": self.ports[name]}
        elif name in GATEWAYS:
            values |= {**_GATEWAY, **stores, "gateway_port": self.ports[name]}
            values["spool_dir"] = self.spool
        else:
            values |= {**_WORKER, "worker_port": self.ports[name], "replica_id": name}
            values["model_version"] = self.manifest.version
            values["journal_dir"] = self.journal(name)
            values["control_plane_url"] = f"http://127.0.0.1:{self.ports[CONTROL_PLANE]}"
        environ = {env_name(field): str(value) for field, value in values.items()}
        return {**environ, "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}


@contextmanager
def a_stack() -> Iterator[Stack]:
    """Services that nobody else uses, and a database to copy for each chapter."""
    with open_directory("kill") as root:
        (root / "postgres").mkdir(mode=0o755)
        (root / "valkey").mkdir()
        postgres, valkey = PostgresServer(root / "postgres"), ValkeyServer(root / "valkey")
        with hold_port(postgres.embedded.port):
            postgres.running.start()
            valkey.running.start()
            upgrade(postgres.create_database(TEMPLATE))
            stack = Stack(root, postgres, valkey)
            try:
                yield stack
            finally:
                stack.close()
                valkey.running.stop()
                postgres.running.stop()


def hold_port(port: int) -> socket.socket:
    """Nobody is given this port while its server is dead; the server itself may listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_gone(pids: list[int]) -> None:
    """Until the kernel has taken back what they held, which a new server looks at."""
    deadline = time.monotonic() + GONE_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a killed process does not end"
        time.sleep(0.001)
