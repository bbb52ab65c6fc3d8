"""The autoscaler's shell: reads what is so, decides, writes how many replicas are wanted.

A round takes each governed deployment by itself: one that cannot be judged delays no other.
Whoever leads goes on from the state that the last leader left, and every write is fenced, so a
decision is taken once. Starting, waking, putting to sleep and stopping is the launchers' work.
"""

import asyncio
import logging
from typing import Any

import msgspec

from control_plane.background import Job
from control_plane.scaler_signals import signals_of
from control_plane.scaling.decide import Decision, decide
from control_plane.scaling.policy import ScalingPolicy
from control_plane.scaling.signals import Signals
from control_plane.scaling.state import State
from control_plane.services import Services
from store import registry, rollouts, scaling
from store.leader import NotLeaderError
from store.pool_view import Unknown
from store.postgres import StoreAwayError
from store.scaling import Governed, ReplicaFacts, Traffic

DEPLOYMENTS_MAX = 500  # read at once
TOLD_EVERY_MS = 300_000  # among the decisions, though nothing changed
COUNT_S = 3.0  # for the requests of one deployment's last minutes
KEPT_MAX = 10_000  # decisions of one deployment
FORGET_MAX = 1_000  # in one round
AWAKE = frozenset({"starting", "loading", "warming", "ready"})

_log = logging.getLogger(__name__)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about one deployment, before anything is written."""

    governed: Governed
    policy: ScalingPolicy
    decision: Decision


class Scaler:
    """`round` decides about every governed deployment once."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.every_ms = services.settings.scaling_every_ms

    async def round(self) -> None:
        """Raises StoreAwayError when nothing can be read, NotLeaderError when we lead no more."""
        after = ""
        while True:
            async with self._services.postgres.connection() as conn:
                page = await scaling.governed(conn, after=after, limit=DEPLOYMENTS_MAX)
            for one in page:
                await self.decide_one(one)
            if len(page) < DEPLOYMENTS_MAX:
                break
            after = page[-1].deployment
        await self._forget()

    async def decide_one(self, governed: Governed) -> None:
        """About one, as it was read. Raises NotLeaderError."""
        try:
            plan = await plan_for(self._services, governed)
            await self._write(plan)
        except NotLeaderError:
            raise
        except (StoreAwayError, msgspec.ValidationError, ValueError):
            # A policy or a row that a newer release wrote; the others have their turn.
            self._services.metrics.scaling_rounds.labels("failed").inc()
            _log.exception("not decided", extra={"facts": {"deployment": governed.deployment}})
            return
        self._services.metrics.scaling_rounds.labels("done").inc()
        name, decision = governed.deployment, plan.decision
        self._services.metrics.scaling_desired.labels(name).set(decision.desired)
        self._services.metrics.scaling_alarms.labels(name).set(len(decision.alarms))

    async def _write(self, plan: Plan) -> None:
        name, decision = plan.governed.deployment, plan.decision
        async with self._services.postgres.transaction() as conn:
            await self._services.leadership.fence(conn)
            if not await scaling.is_as_read(conn, plan.governed):
                return  # by an operator meanwhile: the next round sees it
            last = await scaling.said(conn, name)
            told = (
                last is None
                or is_news(last.decision, decision)
                or (last.told_ms_ago >= TOLD_EVERY_MS)
            )
            before = plan.governed.replicas_desired
            if before != decision.desired:
                await registry.set_replicas_desired(conn, name, decision.desired)
            if plan.governed.replicas_warm != plan.policy.warm_replicas:
                await registry.set_replicas_warm(conn, name, plan.policy.warm_replicas)
            if told or before != decision.desired:
                await scaling.tell_decision(conn, name, {"before": before, **word(decision)})
                await scaling.cut_decisions(conn, name, kept_max=KEPT_MAX, limit=FORGET_MAX)
            await scaling.keep_state(
                conn,
                name,
                state=msgspec.to_builtins(decision.state),
                decision=word(decision),
                told=told,
            )
        if before != decision.desired:
            facts = {"deployment": name, "before": before, **word(decision)}
            _log.info("replicas wanted", extra={"facts": facts})

    async def _forget(self) -> None:
        async with self._services.postgres.transaction() as conn:
            await self._services.leadership.fence(conn)
            await scaling.forget_decisions(
                conn,
                kept_ms=self._services.settings.scaling_kept_ms,
                limit=FORGET_MAX,
            )


def scaler_job(services: Services) -> Job:
    """On the control plane that leads."""
    scaler = Scaler(services)
    return Job(name="scaler", every_ms=scaler.every_ms, run=scaler.round, leader=True)


async def plan_for(
    services: Services, governed: Governed, policy: ScalingPolicy | None = None
) -> Plan:
    """What would be decided now, by its own policy or by another; writes nothing.

    Raises:
        StoreAwayError: Postgres could not be read.
        msgspec.ValidationError: The policy, or a fact, is of a form that is not known here.
    """
    policy = policy or policy_of(governed.body or {})
    async with services.postgres.connection() as conn:
        floors = await rollouts.floors(conn)
    policy = at_least(policy, floors.get(governed.deployment, 0))
    signals, at_ms = await signals_now(services, governed, policy)
    decision = decide(policy, state_of(governed.state), signals, at_ms)
    return Plan(governed=governed, policy=policy, decision=decision)


def at_least(policy: ScalingPolicy, floor: int) -> ScalingPolicy:
    """The policy while a rollout needs so many: no fewer, within what may ever be wanted."""
    least = max(policy.min_replicas, min(floor, policy.ceiling))
    return msgspec.structs.replace(policy, min_replicas=least)


def policy_of(body: dict[str, Any]) -> ScalingPolicy:
    """As kept. Raises msgspec.ValidationError."""
    return msgspec.convert(body, ScalingPolicy)


def state_of(kept: dict[str, Any] | None) -> State:
    """As kept; one that is not understood is begun anew."""
    try:
        return State() if kept is None else msgspec.convert(kept, State)
    except msgspec.ValidationError:
        return State()


def word(decision: Decision) -> dict[str, Any]:
    """What people are told of it."""
    return {
        "desired": decision.desired,
        "wake": decision.wake,
        "start": decision.start,
        "stop": decision.stop,
        "reasons": list(decision.reasons),
        "alarms": list(decision.alarms),
    }


def is_news(last: dict[str, Any], decision: Decision) -> bool:
    """Whether it says something else than the last one, numbers within sentences aside."""
    now = word(decision)
    return bool(
        last["desired"] != now["desired"]
        or now["wake"]
        or _heads(last["alarms"]) != _heads(now["alarms"])
    )


def _heads(texts: list[str]) -> set[str]:
    return {text.partition(" ")[0] for text in texts}


async def signals_now(
    services: Services, governed: Governed, policy: ScalingPolicy
) -> tuple[Signals, int]:
    """What is seen of it at this moment, by the database's clock. Raises StoreAwayError."""
    # First, so that no connection to Postgres waits for Valkey.
    pool = await services.pools.pool(governed.deployment, governed.region)
    window_ms = policy.panic_window_ms
    async with services.postgres.connection() as conn, conn.transaction():
        at_ms = await scaling.now_ms(conn)
        replicas = await scaling.replicas(conn, governed.deployment)
        starts = await scaling.cold_starts(conn, governed.version)
    traffic = await _traffic(services, governed, at_ms=at_ms, window_ms=window_ms)
    signals = signals_of(
        replicas,
        pool,
        traffic,
        starts,
        window_ms=window_ms,
        sharing=governed.sharing,
        filling=_for_the_warm_pool(governed, replicas),
    )
    return signals, at_ms


async def _traffic(
    services: Services, governed: Governed, *, at_ms: int, window_ms: int
) -> Traffic | Unknown:
    """Of a busy region there are many requests to count: without an answer the rest decides."""
    try:
        async with (
            asyncio.timeout(COUNT_S),
            services.postgres.connection() as conn,
            conn.transaction(),
        ):
            return await scaling.traffic(
                conn,
                version=governed.version,
                region=governed.region,
                at_ms=at_ms,
                window_ms=window_ms,
            )
    except TimeoutError:
        return Unknown(f"not counted within {COUNT_S:g} s")
    except StoreAwayError as error:
        return Unknown(f"not counted: {error}")


def _for_the_warm_pool(governed: Governed, replicas: list[ReplicaFacts]) -> int:
    """What is awake or comes beyond what is wanted to serve."""
    if not governed.replicas_warm or governed.replicas_desired is None:
        return 0
    awake = [one for one in replicas if one.state in AWAKE]
    return min(governed.replicas_warm, len(awake) - governed.replicas_desired)
