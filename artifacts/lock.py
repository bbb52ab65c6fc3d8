"""One pull of one thing at a time, across processes.

A lock is an open file: the kernel lets go of it when its holder dies, so a killed pull
leaves nothing to clean up.
"""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from artifacts.errors import BusyError

POLL_S = 0.1
WAIT_S_MAX = 3600.0  # a large model over a slow line


@contextlib.contextmanager
def file_lock(path: Path, *, wait_s: float = WAIT_S_MAX) -> Iterator[None]:
    """Hold `path` exclusively. Raises BusyError after `wait_s`."""
    deadline = time.monotonic() + wait_s
    with path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BusyError(
                        f"another process holds {path}; waited {wait_s:.0f} s"
                    ) from None
                time.sleep(POLL_S)
        yield
