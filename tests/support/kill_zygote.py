"""A process that has imported everything, and forks our processes from it in milliseconds.

Starting Python and importing takes most of a second, too long where a process is killed twice
in one. A child runs what `python -m …` runs, with its environment, in a session of its own.
The children die with the zygote, and the zygote with whoever holds its input.
"""

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1


class Zygote:
    """The holder's side. Calls are short, and answered in order."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kill_zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(self, kind: str, environ: Mapping[str, str], log: Path) -> int:
        """The pid. None of our processes has children of its own."""
        return int(self._ask(kind=kind, environ=dict(environ), log=str(log)))

    def reap(self, pid: int) -> int:
        """Wait for a child's end; until then its pid is nobody else's. Its status, as a shell's."""
        return os.waitstatus_to_exitcode(self._ask(reap=pid))

    def close(self) -> None:
        """End it, and so every child."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _ask(self, **words: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the zygote has died"
        return json.loads(answer)


def is_alive(pid: int) -> bool:
    """Whether a child still runs: one that has ended and was not reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _serve(mains: Mapping[str, Callable[[], int]]) -> None:
    """Answer requests until the input ends. What was imported is shared with every child."""
    out = os.dup(sys.stdout.fileno())
    gc.collect()
    gc.freeze()
    with os.fdopen(os.dup(sys.stdin.fileno())) as requests:
        for line in iter(requests.readline, ""):
            words = json.loads(line)
            if "reap" in words:
                _, answer = os.waitpid(words["reap"], 0)
            else:
                answer = _fork(mains[words["kind"]], words["environ"], words["log"])
            os.write(out, json.dumps(answer).encode() + b"\n")


def _fork(main: Callable[[], int], environ: Mapping[str, str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        _die_with_parent()
        _redirect(log)
        os.environ.clear()
        os.environ.update(environ)
        status = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        sys.stderr.flush()
        os._exit(status)


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect(log: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(nothing, 0)
    os.dup2(told, 1)
    os.dup2(told, 2)
    os.closerange(3, 256)  # the zygote's own pipes


def _main() -> None:
    import control_plane.__main__  # noqa: PLC0415 - the holder need not import them
    import gateway.__main__  # noqa: PLC0415 - as above
    import tests.support.kill_worker  # noqa: PLC0415 - as above

    _die_with_parent()
    _serve(
        {
            "control_plane": control_plane.__main__.main,
            "gateway": gateway.__main__.main,
            "worker": tests.support.kill_worker.main,
        }
    )


if __name__ == "__main__":
    _main()
