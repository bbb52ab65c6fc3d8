"""A process as data: what to run, as whom, and how to stop it kindly.

Nothing here starts one; the supervisor and the tests do.
"""

import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One long-running child. `user` is a numeric id, or None to stay who we are."""

    name: str
    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    user: int | None = None
    group: int | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 15.0
