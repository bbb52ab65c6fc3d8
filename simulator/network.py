"""Messages between processes, and what may happen to them.

    call    one request and one reply: either may be lost, late or repeated. Those on one
            named connection keep their order; the others overtake each other. What is under
            way on a connection that was given up arrives all the same
    stream  one request and a stream of frames, as over TCP: in order, or broken. One side may
            notice a break long after the other, or never

A service that is down refuses at once; one that is cut off does not answer at all. Invariant:
nothing reaches a process after its death, and no handler runs for a caller twice at once.
"""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol, TypeVar

import msgspec

from core.protocol import Frame
from simulator.clock import Clock
from simulator.tasks import Process, Promise

R = TypeVar("R")

LATENCY_MS = (0, 2)
SPIKE_MS = (20, 1_500)
ECHO_MS = (1, 400)  # a repeated message comes so much later
RESEND_MS = 200  # what a stream lost is sent again
CONNECT_MS = 1_000


class Weather(msgspec.Struct):
    """How likely each mishap is now, for each message."""

    loss: float = 0.0
    spike: float = 0.0
    echo: float = 0.0
    cut: float = 0.0  # for each batch of frames


class Listener(Protocol):
    """The serving side of a stream."""

    def on_peer_gone(self) -> None:
        """The client closed, died, or the connection broke."""


class Network:
    """Everything in between."""

    def __init__(self, clock: Clock, dice: Random) -> None:
        self.clock = clock
        self.weather = Weather()
        self.cut_off: set[tuple[str, str]] = set()  # pairs of names, sorted
        self._dice = dice
        self._arrivals: dict[str, int] = {}  # of the last message on each connection

    def call(
        self,
        caller: Process,
        service: Process,
        name: str,
        handle: Callable[[], R],
        *,
        timeout_ms: int,
        connection: str = "",
    ) -> Promise[R | None]:
        """What `handle` returned at the service; None when the caller does not get to know."""
        answer: Promise[R | None] = Promise(self.clock)
        label = f"{caller.name} > {service.name} {name}"
        timer = self.clock.after(timeout_ms, f"{label} timeout", lambda: answer.resolve(None))
        answer.then(timer.cancel)

        def arrive() -> None:
            value = handle() if service.alive else None
            if not self._is_lost(caller, service):
                at_ms = self._arrival_ms(f"{connection} back" if connection else "")
                self.clock.at(at_ms, f"{label} reply", lambda: answer.resolve(value))

        at_ms = self._arrival_ms(connection)
        if not self._is_lost(caller, service):
            self.clock.at(at_ms, label, arrive)
            if self.happens(self.weather.echo):
                # On a connection what is repeated is its tail, and that keeps its order.
                echo_ms = at_ms if connection else at_ms + self._dice.randint(*ECHO_MS)
                self.clock.at(echo_ms, f"{label} again", arrive)
        return answer

    def connect(
        self, client: Process, server: Process, name: str, accept: Callable[["Stream"], None]
    ) -> Promise["Stream | None"]:
        """Send a request that is answered by a stream; None when nobody took it, as far as known.

        A request that arrives after the client has given up is taken all the same, and told so.
        """
        answer: Promise[Stream | None] = Promise(self.clock)
        stream = Stream(self, client, server, name)
        label = f"{client.name} > {server.name} {name}"

        def give_up() -> None:
            answer.resolve(None)
            stream.close()

        def arrive() -> None:
            if not server.alive:
                self.clock.after(self.delay_ms(), f"{label} refused", lambda: answer.resolve(None))
                return
            accept(stream)
            if not self._is_lost(client, server):
                taken = f"{label} taken"
                self.clock.after(self.delay_ms(), taken, lambda: answer.resolve(stream))

        timer = self.clock.after(CONNECT_MS, f"{label} timeout", give_up)
        answer.then(timer.cancel)
        if not self._is_lost(client, server):
            stream.send_up(label, arrive)
        return answer

    def is_cut_off(self, one: Process, other: Process) -> bool:
        """Whether nothing passes between these two."""
        return _pair(one, other) in self.cut_off

    def delay_ms(self) -> int:
        """Of one message now."""
        if self._dice.random() < self.weather.spike:
            return self._dice.randint(*SPIKE_MS)
        return self._dice.randint(*LATENCY_MS)

    def roll(self, most: int) -> int:
        """From 0 to `most`."""
        return self._dice.randint(0, most)

    def happens(self, chance: float) -> bool:
        """Roll."""
        return chance > 0 and self._dice.random() < chance

    def _arrival_ms(self, connection: str) -> int:
        at_ms = self.clock.now_ms + self.delay_ms()
        if connection:
            at_ms = max(at_ms, self._arrivals.get(connection, 0))
            self._arrivals[connection] = at_ms
        return at_ms

    def _is_lost(self, one: Process, other: Process) -> bool:
        return self.is_cut_off(one, other) or self.happens(self.weather.loss)


class Stream:
    """One `POST /generate` and its frames. The client reads; the server sends."""

    def __init__(self, network: Network, client: Process, server: Process, name: str) -> None:
        self.name = f"{server.name} > {client.name} {name}"
        self.listener: Listener | None = None
        self._network = network
        self._client = client
        self._server = server
        self._inbox: list[Frame] = []
        self._reader: Promise[list[Frame] | None] | None = None
        self._on_the_way: deque[Callable[[], None]] = deque()  # to the client, in order
        self._down_ms = 0  # when the last of them arrives
        self._up_ms = 0
        self._is_open = True  # for the client
        self._is_broken = False  # nothing more gets through

    # The server's side.

    def send(self, frames: Sequence[Frame], *, last: bool = False) -> None:
        """After the last batch the connection ends."""
        network = self._network
        if self._is_broken:
            return
        is_cut = network.happens(network.weather.cut)
        if is_cut:
            # Where it breaks has nothing to do with where a batch ends.
            frames, last = frames[: network.roll(len(frames))], False
        names = " ".join(type(frame).__name__ for frame in frames)
        self._send_down(f"{self.name} {names}", lambda: self._arrive(list(frames), last=last))
        if is_cut:
            self.break_off(server_notices=network.happens(0.5))

    def break_off(self, *, server_notices: bool, client_notices: bool = True) -> None:
        """The connection is gone; who does not notice goes on waiting or sending."""
        self._is_broken = True
        if client_notices:
            self._send_down(f"{self.name} cut", self._end)
        if server_notices:
            self._tell_server()

    # The client's side.

    def read(self) -> Promise[list[Frame] | None]:
        """All frames that came since, at least one; None when the connection has ended."""
        self._reader = reader = Promise[list[Frame] | None](self._network.clock)
        self._feed()
        return reader

    def close(self) -> None:
        """Read no more. The server hears of it, if anything still gets through."""
        if self._is_open:
            self._end()
            if not self._is_broken:
                self._is_broken = True
                self._tell_server()

    def send_up(self, label: str, action: Callable[[], None]) -> None:
        """Whatever goes to the server, in order."""
        network = self._network
        self._up_ms = max(self._up_ms, network.clock.now_ms + network.delay_ms())
        network.clock.at(self._up_ms, label, action)

    def _send_down(self, label: str, action: Callable[[], None]) -> None:
        network = self._network
        delay_ms = network.delay_ms()
        if network.happens(network.weather.loss):
            delay_ms += RESEND_MS
        self._down_ms = max(self._down_ms, network.clock.now_ms + delay_ms)
        self._on_the_way.append(action)
        network.clock.at(self._down_ms, label, lambda: self._bring_next(label))

    def _bring_next(self, label: str) -> None:
        network = self._network
        if network.is_cut_off(self._client, self._server):
            self._down_ms = max(self._down_ms, network.clock.now_ms + RESEND_MS)
            network.clock.at(self._down_ms, label, lambda: self._bring_next(label))
            return
        self._on_the_way.popleft()()

    def _arrive(self, frames: list[Frame], *, last: bool) -> None:
        if not self._is_open or not self._client.alive:
            return
        self._inbox += frames
        if last:
            self._is_open = False
        self._feed()

    def _end(self) -> None:
        self._is_open = False
        self._feed()

    def _feed(self) -> None:
        reader = self._reader
        if reader is None or reader.done:
            return
        if self._inbox:
            frames, self._inbox = self._inbox, []
            reader.resolve(frames)
        elif not self._is_open:
            reader.resolve(None)

    def _tell_server(self) -> None:
        def arrive() -> None:
            if self._server.alive and self.listener is not None:
                self.listener.on_peer_gone()

        if not self._network.is_cut_off(self._client, self._server):
            self.send_up(f"{self.name} peer gone", arrive)


def _pair(one: Process, other: Process) -> tuple[str, str]:
    first, second = sorted((one.name, other.name))
    return first, second
