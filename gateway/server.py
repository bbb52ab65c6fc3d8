"""Uvicorn around the gateway's application: its bounds, its signals, its drain."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn

from gateway.app import create_app
from gateway.gateway import Gateway
from gateway.http_protocol import bounded
from gateway.settings import GatewaySettings


class Server(uvicorn.Server):
    """Uvicorn's, with our signals: a second one is as patient as the first."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ask to exit, once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Accept nothing more, end what is under way, then exit."""
        self.should_exit = True
        if self._draining is None:
            # Uvicorn waits for its connections: answers must end meanwhile, not after.
            self._draining = asyncio.get_running_loop().create_task(self._gateway.relay.drain())


def listen(settings: GatewaySettings) -> socket.socket:
    """A bound socket: a port that is taken is told before anything is opened.

    Raises OSError.
    """
    address = (settings.gateway_host, settings.gateway_port)
    family, kind, protocol, _, where = socket.getaddrinfo(
        *address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError:
        bound.close()
        raise
    return bound


def make_server(settings: GatewaySettings) -> Server:
    """Ready to `serve`."""
    gateway = Gateway(settings)
    config = uvicorn.Config(
        create_app(gateway),
        http=bounded(
            head_bytes_max=settings.head_bytes_max,
            head_timeout_s=settings.head_timeout_ms / 1000,
        ),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=1024,
        limit_concurrency=settings.connections_max,
        timeout_keep_alive=settings.keep_alive_ms // 1000,
        timeout_graceful_shutdown=(settings.drain_ms + 2 * settings.settle_ms) // 1000 + 1,
    )
    return Server(config, gateway)
