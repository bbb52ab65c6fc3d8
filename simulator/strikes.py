"""How each fault is done to a cast, and made good again."""

from collections.abc import Callable
from random import Random

from simulator.cast import Cast
from simulator.faults import Cure, Fault
from simulator.tasks import Process

JUMP_MS = 8_000  # forward it ends every lease, backward it stands still so long

Strike = Callable[[Random], Cure | None]


class Strikes:
    """Implements `Targets`."""

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._by_fault: dict[Fault, Strike] = {
            Fault.GATEWAY: self._kill_gateway,
            Fault.WORKER: lambda dice: self._kill_worker(dice, power=False),
            Fault.POWER: lambda dice: self._kill_worker(dice, power=True),
            Fault.DRAIN: self._drain,
            Fault.WIPE: self._wipe,
            Fault.ROLLBACK: self._fall_behind,
            Fault.VALKEY: lambda _: _take_down(cast.valkey, cast.valkey.restart),
            Fault.POSTGRES: lambda _: _take_down(cast.bank, cast.bank.restart),
            Fault.CONTROL_PLANE: lambda _: _take_down(
                cast.control_plane, cast.control_plane.restart
            ),
            Fault.PARTITION: self._cut_off,
            Fault.CLOCK: self._jump,
        }

    def strike(self, fault: Fault, dice: Random) -> Cure | None:
        """See `Targets`."""
        return self._by_fault[fault](dice)

    def fail_steps(self, chance: float) -> None:
        """See `Targets`."""
        self._cast.fail_steps(chance)

    def _kill_gateway(self, dice: Random) -> Cure | None:
        name = dice.choice(list(self._cast.gateways))
        if not self._cast.gateways[name].alive:
            return None
        self._cast.kill_gateway(name)
        return lambda: self._cast.start_gateway(name)

    def _kill_worker(self, dice: Random, *, power: bool) -> Cure | None:
        name = dice.choice(list(self._cast.workers))
        if not self._cast.workers[name].alive:
            return None
        self._cast.kill_worker(name, power=power)
        return lambda: self._cast.start_worker(name)

    def _drain(self, dice: Random) -> Cure | None:
        name = dice.choice(list(self._cast.workers))
        worker = self._cast.workers[name]
        if not worker.alive or not worker.drain():
            return None

        def replace() -> None:
            if worker.alive:
                self._cast.kill_worker(name, power=False)
                self._cast.start_worker(name)

        return replace

    def _fall_behind(self, _: Random) -> Cure | None:
        valkey = self._cast.valkey
        if not valkey.alive:
            return None
        memory = valkey.dispatcher.copy()

        def fail_over() -> None:
            if valkey.alive:
                valkey.fail_over(memory)

        return fail_over

    def _wipe(self, _: Random) -> Cure:
        self._cast.valkey.dispatcher.wipe()
        return _nothing

    def _jump(self, dice: Random) -> Cure:
        dispatcher = self._cast.valkey.dispatcher
        dispatcher.jump(dice.randint(-JUMP_MS, JUMP_MS))
        return lambda: dispatcher.jump(0)

    def _cut_off(self, dice: Random) -> Cure:
        cast = self._cast
        servers = ["valkey", "postgres", *cast.workers]
        pairs = [(gateway, server) for gateway in cast.gateways for server in servers]
        pairs += [("control plane", server) for server in ("postgres", *cast.workers)]
        first, second = sorted(dice.choice(pairs))
        cast.network.cut_off.add((first, second))
        return lambda: cast.network.cut_off.discard((first, second))


def _take_down(service: Process, restart: Cure) -> Cure | None:
    if not service.alive:
        return None
    service.kill()
    return restart


def _nothing() -> None:
    """Lost memory is not given back."""
