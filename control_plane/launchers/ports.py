"""Whether a port can be listened on now."""

import socket


def is_free(host: str, port: int) -> bool:
    """Servers listen with SO_REUSEADDR, so one in TIME_WAIT from the last run is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
