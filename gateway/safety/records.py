"""What policies did, on its way to the database: off the token path, and bounded.

Nobody waits for a record. With the database away they wait here, in memory; what does not fit,
or is still here when the gateway ends, is counted and gone.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from core.safety.policy import Assigned, Rule, Stage
from gateway.auth import SourceAwayError
from gateway.metrics import Metrics
from gateway.safety.sieve import Hit
from store.safety import NewHit

_log = logging.getLogger(__name__)

LAST_FLUSH_S = 2.0
WAITING_MAX = 20_000
BATCH = 1_000

Write = Callable[[Sequence[NewHit]], Awaitable[None]]


class Noted:
    """A hit that may still grow, and what is known around it."""

    __slots__ = ("assigned", "at_ms", "choice", "hit", "request_id", "rule", "stage", "tenant_id")

    def __init__(
        self,
        hit: Hit,
        rule: Rule,
        *,
        stage: Stage,
        choice: int,
        assigned: Assigned,
        tenant_id: str,
        request_id: str,
        at_ms: int,
    ) -> None:
        self.hit = hit
        self.rule = rule
        self.stage = stage
        self.choice = choice
        self.assigned = assigned
        self.tenant_id = tenant_id
        self.request_id = request_id
        self.at_ms = at_ms

    def row(self) -> NewHit:
        """As it is by now; its text only where the tenant opted in."""
        return NewHit(
            at_ms=self.at_ms,
            tenant_id=self.tenant_id,
            request_id=self.request_id,
            policy=self.assigned.name,
            policy_version=self.assigned.version,
            rule=self.rule.name,
            stage=self.stage,
            action=self.rule.action,
            choice=self.choice,
            chars=self.hit.chars,
            text=_storable(self.hit.text) if self.assigned.keep_text else None,
        )


def _storable(text: str) -> str:
    """As Postgres takes it: no NUL, and no half of a character from an escape."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


class Records:
    """One for each gateway. `write` raises SourceAwayError when the database is away."""

    def __init__(self, metrics: Metrics, write: Write) -> None:
        self.metrics = metrics
        self._write = write
        self._waiting: deque[Noted] = deque()

    def note(self, noted: Noted) -> None:
        """Keep it for the next `flush`."""
        detector = type(noted.rule.detector).__name__.lower()
        self.metrics.safety_hits.labels(noted.stage, detector, noted.rule.action).inc()
        if len(self._waiting) >= WAITING_MAX:
            self.metrics.safety_records_dropped.inc()
            return
        self._waiting.append(noted)

    async def flush(self) -> None:
        """Write what waits; what could not be written waits on."""
        while self._waiting:
            batch = [self._waiting[at] for at in range(min(BATCH, len(self._waiting)))]
            try:
                await self._write([noted.row() for noted in batch])
            except SourceAwayError:
                raise
            except Exception:  # noqa: BLE001 - one such row must not keep all that follow waiting
                _log.exception("records of safety hits cannot be written")
                self.metrics.safety_records_dropped.inc(len(batch))
            for _ in batch:
                self._waiting.popleft()

    async def close(self) -> None:
        """One last try."""
        try:
            async with asyncio.timeout(LAST_FLUSH_S):
                await self.flush()
        except Exception as error:  # noqa: BLE001 - whatever it is, the gateway is closing
            _log.warning("records of safety hits are lost", extra={"facts": {"error": repr(error)}})
        self.metrics.safety_records_dropped.inc(len(self._waiting))
