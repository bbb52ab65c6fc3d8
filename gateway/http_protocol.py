"""Uvicorn's HTTP/1.1 protocol with the bounds it lacks, and a way to cut a connection.

A request's head has a size and a time to arrive in; a new connection that says nothing is
closed as an idle one is. `client_of` closes the connection at once, whatever waits to be
written, and tells of a client that leaves: `receive` tells it too, but only to a task that does
nothing else than wait there.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

CLIENT = "headworks.client"
Told = Callable[[], None]


class Client(NamedTuple):
    """What an endpoint may do about its client beyond ASGI.

    `cut` closes the connection now. `watch` has its argument called once if the client leaves,
    and returns what ends that.
    """

    cut: Callable[[], None]
    watch: Callable[[Told], Callable[[], None]]


def client_of(scope: Mapping[str, Any]) -> Client:
    """The client of a request that came through `BoundedProtocol`."""
    client = scope["extensions"][CLIENT]["it"]
    assert isinstance(client, Client)
    return client


class BoundedProtocol(HttpToolsProtocol):
    """`head_bytes_max` and `head_timeout_s` are set on a subclass, by `bounded`."""

    head_bytes_max = 65_536
    head_timeout_s = 20.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._watching: set[Told] = set()  # of requests under way, one at a time
        self._left = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base has it
        """The first request's time begins with the connection."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """No request will come."""
        self._stop_head_timer()
        super().connection_lost(exc)
        self._left = True
        watching, self._watching = self._watching, set()
        for told in watching:
            told()

    def data_received(self, data: bytes) -> None:
        """The parser keeps what it has of a header to itself, so bytes are counted here."""
        self._head_bytes = len(data) + (self._head_bytes if self._in_head else 0)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.head_bytes_max:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self.scope["extensions"] = {CLIENT: {"it": Client(self.transport.abort, self._watch)}}
        self._in_head = True
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def _watch(self, told: Told) -> Callable[[], None]:
        if self._left:
            told()
        else:
            self._watching.add(told)
            self.flow.resume_reading()  # a goodbye must be heard, whatever else is read with it
        return partial(self._watching.discard, told)

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._refuse(HTTPStatus.REQUEST_TIMEOUT)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the base's words are not ours
        """Bytes that are not HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST)

    def _refuse(self, status: HTTPStatus) -> None:
        """Before a dialect is known; both SDKs read a message from this shape."""
        if self.transport.is_closing():
            return
        kind = "invalid_request_error"
        body = (
            f'{{"type":"error","error":{{"type":"{kind}","message":"{status.phrase}",'
            f'"param":null,"code":null}}}}'
        ).encode()
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % len(body)
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def bounded(*, head_bytes_max: int, head_timeout_s: float) -> type[BoundedProtocol]:
    """The protocol class with these bounds, for uvicorn's configuration."""

    class Configured(BoundedProtocol):
        pass

    Configured.head_bytes_max = head_bytes_max
    Configured.head_timeout_s = head_timeout_s
    return Configured
