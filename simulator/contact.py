"""Who decides for a gateway: the shared dispatcher, or while that is away a twin of its own.

The shared one decides while every call to it is answered. After one that is not, its
connection is dropped and with it all calls under way, though they may yet be executed; the
gateway comes back under a new name, and the old name's lease runs out. Invariant: a call is
answered by who decided when its answer came.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from core.dispatch import PoolRules
from simulator.dispatcher import Dispatcher, PoolType, Valkey
from simulator.network import Network
from simulator.tasks import Process, Promise, sleep

R = TypeVar("R")
Command = Callable[[Dispatcher], R]

CALL_MS = 400
ALONE_MS = 250  # at least, once the shared one failed


class Contact:
    """One gateway incarnation's. `on_change` is called when somebody else decides."""

    def __init__(
        self,
        gateway: Process,
        gateway_id: str,
        *,
        network: Network,
        valkey: Valkey,
        pool_type: PoolType,
        on_change: Callable[[], None],
    ) -> None:
        self.lives = 1
        self._gateway = gateway
        self._gateway_id = gateway_id
        self._network = network
        self._valkey = valkey
        self._pool_type = pool_type
        self._on_change = on_change
        self._boots = valkey.boots  # of the server at the other end of the connection
        self._own: Dispatcher | None = None
        self._back_ms = gateway.clock.now_ms
        self._under_way: dict[Promise[Any], None] = {}

    @property
    def name(self) -> str:
        """The gateway's in its present life: another after each time alone."""
        return self._gateway_id if self.lives == 1 else f"{self._gateway_id}~{self.lives}"

    @property
    def shared_since_ms(self) -> int | None:
        """Since when the shared one decides without a break; None while it does not."""
        return self._back_ms if self._own is None else None

    async def ask(self, label: str, make: Callable[[], Command[R]]) -> R:
        """The answer of whoever decides; `make` is called when it is sent."""
        if self._own is None:
            answer = await self._call(label, make())
            if answer is not None:
                return answer
            self._go_alone()
        assert self._own is not None, "who is alone has a twin"
        return make()(self._own)

    def _call(self, label: str, command: Command[R]) -> Promise[R | None]:
        valkey, boots = self._valkey, self._boots
        return self._send(
            label, lambda: command(valkey.dispatcher) if valkey.boots == boots else None
        )

    def _send(self, label: str, handle: Callable[[], R]) -> Promise[R | None]:
        answer = self._network.call(
            self._gateway,
            self._valkey,
            label,
            handle,
            timeout_ms=CALL_MS,
            connection=self.name,
        )
        self._under_way[answer] = None
        answer.then(lambda: self._under_way.pop(answer, None))
        return answer

    def _go_alone(self) -> None:
        if self._own is not None:
            return
        self.lives += 1
        # Nobody else will announce anything here, so there is nothing to wait for.
        rules = PoolRules(reannounce_ms=0)
        self._own = Dispatcher(self._gateway.clock, self._pool_type, rules)
        for answer in list(self._under_way):
            answer.resolve(None)
        self._on_change()
        self._gateway.spawn(self._come_back())

    async def _come_back(self) -> None:
        await sleep(self._gateway.clock, ALONE_MS, f"{self._gateway.name} alone")
        while (boots := await self._send("connect", lambda: self._valkey.boots)) is None:
            await sleep(self._gateway.clock, ALONE_MS, f"{self._gateway.name} alone")
        self._boots = boots
        self._own = None
        self._back_ms = self._gateway.clock.now_ms
        self._on_change()
