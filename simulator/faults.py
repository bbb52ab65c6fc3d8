"""What goes wrong, when, and to whom: drawn from the seed, until the calm.

Steady faults are weather; the others strike at random moments and are made good after a
while, which is sometimes longer than all that waits for it. Invariant: once it is calm nothing
goes wrong any more, so that what is not at rest a while later never will be.
"""

from collections.abc import Callable
from enum import StrEnum
from random import Random
from typing import Protocol

from simulator.clock import Clock
from simulator.network import Network

STRIKE_GAP_MS = 400  # mean, for each kind and each other kind beside it
STRIKE_GAP_MIN_MS = 1_000
OUTAGE_MS = (200, 6_000)
LONG_OUTAGE_MS = (8_000, 16_000)  # longer than a lease and a grace
LONG_CHANCE = 0.1

Cure = Callable[[], None]


class Fault(StrEnum):
    """A kind of mishap."""

    LOSS = "loss"  # messages get lost
    DELAY = "delay"  # some are late, and so overtake each other
    REPEAT = "repeat"  # some come twice
    CUT = "cut"  # streams break
    PARTITION = "partition"  # two processes cannot reach each other
    STEP = "step"  # an engine step fails
    GATEWAY = "gateway"  # is killed, and comes back as another
    WORKER = "worker"  # the same
    DRAIN = "drain"  # a worker takes nothing new, and is replaced
    POWER = "power"  # a worker's machine loses power, and the end of its journal
    WIPE = "wipe"  # Valkey loses its memory
    VALKEY = "valkey"  # is away, and comes back without memory
    ROLLBACK = "rollback"  # Valkey fails over to a copy that is behind
    POSTGRES = "postgres"  # is away
    CLOCK = "clock"  # Valkey's jumps, and jumps back
    CONTROL_PLANE = "control_plane"  # is away


ALL_FAULTS = tuple(Fault)
STEADY_FAULTS = {Fault.LOSS, Fault.DELAY, Fault.REPEAT, Fault.CUT, Fault.STEP}


class Targets(Protocol):
    """What can be struck."""

    def strike(self, fault: Fault, dice: Random) -> Cure | None:
        """Do it to one of them; None when it is down already."""

    def fail_steps(self, chance: float) -> None:
        """Of every engine, present and future."""


class Injector:
    """Strikes until `calm_ms`."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        targets: Targets,
        *,
        dice: Random,
        faults: tuple[Fault, ...],
        calm_ms: int,
    ) -> None:
        self.strikes: dict[str, int] = {}
        self._clock = clock
        self._network = network
        self._targets = targets
        self._dice = dice
        self._calm_ms = calm_ms
        self._uncured = 0
        self._darken(faults)
        striking = [fault for fault in faults if fault not in STEADY_FAULTS]
        self._gap_ms = max(STRIKE_GAP_MIN_MS, STRIKE_GAP_MS * len(striking))
        for fault in striking:
            self._plan(fault)
        clock.at(calm_ms, "the calm", lambda: self._darken(()))

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong any more."""
        return self._uncured == 0 and self._clock.now_ms >= self._calm_ms

    def _darken(self, faults: tuple[Fault, ...]) -> None:
        weather = self._network.weather
        weather.loss = 0.03 if Fault.LOSS in faults else 0.0
        weather.spike = 0.03 if Fault.DELAY in faults else 0.0
        weather.echo = 0.1 if Fault.REPEAT in faults else 0.0
        weather.cut = 0.02 if Fault.CUT in faults else 0.0
        self._targets.fail_steps(0.01 if Fault.STEP in faults else 0.0)

    def _plan(self, fault: Fault) -> None:
        delay_ms = 1 + int(self._dice.expovariate(1 / self._gap_ms))
        if self._clock.now_ms + delay_ms < self._calm_ms:
            self._clock.after(delay_ms, f"fault {fault}", lambda: self._strike(fault))

    def _strike(self, fault: Fault) -> None:
        self._plan(fault)
        cure = self._targets.strike(fault, self._dice)
        if cure is None:
            return
        self.strikes[fault] = self.strikes.get(fault, 0) + 1
        self._uncured += 1
        is_long = self._dice.random() < LONG_CHANCE
        delay_ms = self._dice.randint(*(LONG_OUTAGE_MS if is_long else OUTAGE_MS))
        self._clock.after(delay_ms, f"cure {fault}", lambda: self._cure(cure))

    def _cure(self, cure: Cure) -> None:
        self._uncured -= 1
        cure()
