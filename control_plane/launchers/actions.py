"""What a plan is made from, and what it says to do. Pure."""

import msgspec

from control_plane.launchers.life import LifeRules, Replica
from core.launch import Launch, Place
from core.worker_spec import LauncherKind


class PlanRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of launching."""

    life: LifeRules = LifeRules()
    drain_ms: int = 600_000
    places_max: int = 8
    retry_first_ms: int = 1000
    retry_max_ms: int = 300_000
    stable_ms: int = 60_000  # a life so long clears the failures before it
    away_ms: int = 3_600_000  # after which what a launcher out of reach held is given up


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment. `replicas` null: nobody manages their number. `warm` more sleep."""

    deployment: str
    replicas: int | None
    warm: int = 0
    launcher: LauncherKind = LauncherKind.EXTERNAL
    draining: bool = False


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is. `home` and `places` are of the one launcher that can be reached."""

    replicas: tuple[Replica, ...] = ()
    launches: tuple[Launch, ...] = ()
    places: tuple[Place, ...] = ()
    home: str = ""  # "": there is none


class Act(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """With the reason, for the log and the audit."""

    replica_id: str
    reason: str


class Ask(Act, frozen=True, kw_only=True):
    """Write down that it is wanted; it is started in the next round."""

    deployment: str


class Start(Act, frozen=True, kw_only=True):
    """Have the launcher start it."""


class Adopt(Act, frozen=True, kw_only=True):
    """It runs, and whoever started it did not live to note it."""


class Settle(Act, frozen=True, kw_only=True):
    """Forget the failures before."""


class Fail(Act, frozen=True, kw_only=True):
    """Note that it ended by itself, or never came, and when to try again."""

    retry_in_ms: int


class Wake(Act, frozen=True, kw_only=True):
    """Ask its worker to wake."""


class Sleep(Act, frozen=True, kw_only=True):
    """Ask its worker to sleep, to be woken when more are wanted."""


class Drain(Act, frozen=True, kw_only=True):
    """Place no more on it, and let what runs finish."""

    within_ms: int


class AskStop(Act, frozen=True, kw_only=True):
    """Write down that it is not wanted any more."""

    grace_ms: int


class Stop(Act, frozen=True, kw_only=True):
    """Have the launcher end its process."""


class Forget(Act, frozen=True, kw_only=True):
    """Nothing runs there: drop its launch."""


Action = Ask | Start | Adopt | Settle | Fail | Wake | Sleep | Drain | AskStop | Stop | Forget
