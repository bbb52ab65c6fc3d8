"""Gives up replicas that are gone, so that gateways see them as not ready.

Slow on purpose: a dead replica's connections fail at once and gateways act on that. A row is
marked lost only when nothing was heard for `replica_lost_ms`, through all of which we were
listening, and the replica does not answer when asked. A beat brings it back.
"""

import logging
import time
from collections.abc import Callable

from control_plane.contact import Contact
from control_plane.replica_client import ReplicaLoad, Unreachable
from control_plane.services import Services
from control_plane.settings import ControlPlaneSettings
from store import fleet
from store.fleet import SilentReplica

ROUNDS_IN_SILENCE = 5
BATCH_MAX = 200  # asked within a round, even when none of them answers

_log = logging.getLogger(__name__)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Reaper:
    """`round` is one look; run it every `every_ms` of the monotonic clock."""

    def __init__(
        self,
        services: Services,
        settings: ControlPlaneSettings,
        clock_ms: Callable[[], int] = _monotonic_ms,
    ) -> None:
        self._services = services
        self._clock_ms = clock_ms
        self._kept_ms = settings.replica_kept_ms
        self._silent_ms = settings.replica_lost_ms
        self.every_ms = max(1, self._silent_ms // ROUNDS_IN_SILENCE)
        # A round that comes this late means that we were away ourselves.
        self._contact = Contact(gap_max_ms=3 * self.every_ms)

    async def round(self) -> None:
        """Raises StoreAwayError; contact then begins anew."""
        async with self._services.postgres.transaction() as conn:
            silent = await fleet.silent_replicas(conn, silent_ms=self._silent_ms, limit=BATCH_MAX)
            await fleet.forget_old(conn, kept_ms=self._kept_ms)
        listened_ms = self._contact.heard(self._clock_ms())
        if silent and listened_ms >= self._silent_ms:
            await self._judge(silent)

    async def _judge(self, silent: list[SilentReplica]) -> None:
        answers = await self._services.replicas.loads([replica.url for replica in silent])
        gone = [
            replica
            for replica, answer in zip(silent, answers, strict=True)
            if not is_alive(replica, answer)
        ]
        if not gone:
            return
        async with self._services.postgres.transaction() as conn:
            for replica in gone:
                if await fleet.mark_lost(conn, replica, silent_ms=self._silent_ms):
                    self._services.metrics.replicas_lost.inc()
                    facts = {"replica": replica.replica_id, "boot": replica.boot_id}
                    _log.warning("replica lost", extra={"facts": facts})


def is_alive(replica: SilentReplica, answer: ReplicaLoad | Unreachable) -> bool:
    """Whether the life we have not heard is the one that answers at its address."""
    return isinstance(answer, ReplicaLoad) and answer.boot_id == replica.boot_id
