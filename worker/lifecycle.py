"""Where this worker is in its life, and whether it takes work."""

from core.fleet import ReplicaState


class Lifecycle:
    """starting -> loading -> warming -> ready -> draining -> stopped; never backwards."""

    _ORDER = (
        ReplicaState.STARTING,
        ReplicaState.LOADING,
        ReplicaState.WARMING,
        ReplicaState.READY,
        ReplicaState.DRAINING,
        ReplicaState.STOPPED,
    )

    def __init__(self) -> None:
        self.state = ReplicaState.STARTING

    def advance(self, to: ReplicaState) -> None:
        """Move forward; a move backwards (a late READY while draining) is ignored."""
        if self._ORDER.index(to) > self._ORDER.index(self.state):
            self.state = to

    @property
    def takes_work(self) -> bool:
        """Only a ready worker does."""
        return self.state is ReplicaState.READY
