"""Moves rollouts on: read, decide, keep. The leader's job.

A look's writes are one transaction that the fence lets through or not, on rows that nobody has
moved since they were read; so a decision is kept once or not at all, whoever dies when.
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from control_plane.background import Job
from control_plane.rollout_keep import MovedMeanwhileError, keep, read
from control_plane.rollout_watch import MEASURE_S, demand, measure, observe
from control_plane.rollouts import machine
from control_plane.rollouts.samples import Sample, Window
from control_plane.rollouts.state import Decision, Rollout
from control_plane.services import Services
from store import rollouts
from store.leader import NotLeaderError
from store.postgres import StoreAwayError
from store.rollouts import RolloutRow

ACTOR = "rollouts"  # in the audit log: nobody's hand
ROLLOUTS_MAX = 200  # looked at in a round
# For one of them: a demand and a sample that get no answer leave time to decide without them.
LOOK_S = 2 * MEASURE_S + 5.0
# A window is measured again when it has grown by so much: before, it holds few requests more.
GROWTH_PERCENT = 5

_log = logging.getLogger(__name__)


class RolloutRunner:
    """`round` looks at every rollout that has something left to do."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._measured: dict[str, Sample] = {}  # the last one of each rollout
        self._last = ""  # looked at

    async def round(self) -> None:
        """Raises NotLeaderError, StoreAwayError, and the last fault of a rollout's own."""
        async with self._services.postgres.connection() as conn:
            rows = await rollouts.open_rollouts(conn, limit=ROLLOUTS_MAX)
        self._measured = {r.name: s for r in rows if (s := self._measured.get(r.name))}
        fault: Exception | None = None
        for row in turned(rows, self._last):
            self._last = row.name
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._look(row)
            except (NotLeaderError, StoreAwayError):
                raise
            except Exception as error:  # noqa: BLE001 - raised below, once the other rollouts were looked at
                _log.exception("a rollout failed", extra={"facts": {"rollout": row.name}})
                fault = error
        if fault is not None:
            raise fault

    async def _look(self, row: RolloutRow) -> None:
        rollout = read(row)
        async with self._services.postgres.connection() as conn:
            now_ms = await rollouts.now_ms(conn)
        demand_rps = await demand(self._services, row, now_ms)
        sample = await self._sample(row, rollout, now_ms)
        # Last, so that the table is the newest that the decision can be of.
        async with self._services.postgres.connection() as conn:
            observed = await observe(conn, row, demand_rps=demand_rps)
        observed = msgspec.structs.replace(observed, sample=sample)
        decision = machine.advance(rollout, observed, now_ms)
        try:
            async with self._services.postgres.transaction() as conn:
                await self._services.leadership.fence(conn)
                version = await keep(
                    conn, row, decision, table=observed.table, actor=ACTOR, sample=sample
                )
        except MovedMeanwhileError:
            return  # by an operator: the next look sees it
        _tell(row, decision)
        if version is not None:
            await self._services.announcer.route(row.model, version)

    async def _sample(self, row: RolloutRow, rollout: Rollout, now_ms: int) -> Sample | None:
        window = machine.window(rollout, now_ms)
        if window is None:
            return None
        last = self._measured.get(row.name)
        if last is not None and not _has_grown(last.window, window):
            return last
        sample = await measure(self._services, row, rollout.plan, window)
        if sample is not None:
            self._measured[row.name] = sample
        return sample


def turned(rows: Sequence[RolloutRow], last: str) -> list[RolloutRow]:
    """The one after `last` first: a round that is cut short goes on there, and starves none."""
    begin = next((at + 1 for at, row in enumerate(rows) if row.name == last), 0)
    return [*rows[begin:], *rows[:begin]]


def rollouts_job(services: Services) -> Job:
    """On the control plane that leads."""
    runner = RolloutRunner(services)
    every_ms = services.settings.rollout_every_ms
    return Job(name="rollouts", every_ms=every_ms, run=runner.round, leader=True)


def _has_grown(last: Window, window: Window) -> bool:
    if last.from_ms != window.from_ms:
        return True
    length = last.to_ms - last.from_ms
    return (window.to_ms - last.to_ms) * 100 >= length * GROWTH_PERCENT


def _tell(row: RolloutRow, decision: Decision) -> None:
    for transition in decision.transitions:
        facts = {
            "rollout": row.name,
            "model": row.model,
            "event": transition.event,
            "state": transition.after,
            "percent": transition.percent,
            "reasons": list(transition.reasons),
        }
        _log.info("rollout moved", extra={"facts": facts})
    if decision.release:
        facts = {"rollout": row.name, "deployment": decision.release}
        _log.info("a rollout needs a deployment no longer", extra={"facts": facts})
