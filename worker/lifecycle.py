"""Where this worker is in its life, and whether it takes work."""

from core.fleet import ReplicaState

ASLEEP = "asleep"


class Lifecycle:
    """starting -> loading -> warming -> ready -> draining -> stopped; never backwards.

    A ready worker may be away for a while (asleep, waking, changing) and come back. To the
    fleet it is then SLEEPING, or WARMING while it comes back: alive, and not to be placed on.
    """

    _ORDER = (
        ReplicaState.STARTING,
        ReplicaState.LOADING,
        ReplicaState.WARMING,
        ReplicaState.READY,
        ReplicaState.DRAINING,
        ReplicaState.STOPPED,
    )

    def __init__(self) -> None:
        self._at = ReplicaState.STARTING
        self.away = ""

    def advance(self, to: ReplicaState) -> None:
        """Move forward; a move backwards (a late READY while draining) is ignored."""
        if self._ORDER.index(to) > self._ORDER.index(self._at):
            self._at = to

    def leave(self, why: str) -> None:
        """Take no work until `come_back`."""
        self.away = why

    def come_back(self) -> None:
        """Take work again, unless it is draining by now."""
        self.away = ""

    @property
    def state(self) -> ReplicaState:
        """As the fleet knows it."""
        if not self.away or not self.is_up:
            return self._at
        return ReplicaState.SLEEPING if self.away == ASLEEP else ReplicaState.WARMING

    @property
    def word(self) -> str:
        """As this worker tells it itself."""
        return self.away if self.away and self.is_up else self._at.value

    @property
    def is_up(self) -> bool:
        """Loaded once, and not asked to stop."""
        return self._at is ReplicaState.READY

    @property
    def takes_work(self) -> bool:
        """Only a ready worker does that is not away."""
        return self.state is ReplicaState.READY
