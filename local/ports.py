"""Loopback ports: is one free, and which one shall an embedded service keep."""

import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"


class PortTakenError(Exception):
    """Somebody else listens there; the message says on which and what to do."""


def is_free(port: int) -> bool:
    """Whether we could listen on it now."""
    with socket.socket() as probe:
        # As servers do: a port in TIME_WAIT from the last run is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def require_free(port: int, purpose: str, option: str) -> None:
    """Raises PortTakenError."""
    if not is_free(port):
        raise PortTakenError(
            f"port {port} for the {purpose} is taken; stop what listens there, "
            f"or choose another with {option}"
        )


def kept_port(path: Path) -> int:
    """The port in `path` while it is free, else a new one, which `path` then holds.

    An embedded service keeps its port, so that a URL copied yesterday works today.
    """
    if path.exists() and (text := path.read_text().strip()).isdigit() and is_free(int(text)):
        return int(text)
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = int(probe.getsockname()[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(port))
    return port
