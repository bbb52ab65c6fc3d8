"""Which jobs run beside the API: the sweeper for gateways, the reaper for replicas, rollouts."""

import logging

from control_plane.access_job import access_job
from control_plane.background import Job
from control_plane.idempotency_job import idempotency_job
from control_plane.launchers.base import Launcher
from control_plane.launchers.reconcile import launch_job
from control_plane.reaper import Reaper
from control_plane.reconciler import Reconciler
from control_plane.response_jobs import responses_job
from control_plane.rollout_runner import rollouts_job
from control_plane.safety_job import safety_job
from control_plane.scaler import scaler_job
from control_plane.services import Services
from control_plane.soft_caps import soft_caps_job
from control_plane.usage_jobs import usage_jobs
from store.leases import Sweeper, SweeperConfig

SWEEP_EVERY_MS_MAX = 1000
CONTACT_GAP_S_MIN = 2.0

_log = logging.getLogger(__name__)


def jobs(services: Services, launcher: Launcher) -> list[Job]:
    """Any number of control planes may run them at once, but for a leader's."""
    reaper = Reaper(services, services.settings)
    reconciler = Reconciler(services)
    every_ms = sweep_every_ms(services.settings.lease_ms)
    sweeper = Sweeper(services.postgres, sweeper_config(services.settings.lease_ms))

    async def sweep() -> None:
        swept = await sweeper.sweep()
        services.metrics.swept.labels("lost").inc(swept.lost)
        services.metrics.swept.labels("not_started").inc(swept.not_started)
        if swept.lost or swept.not_started:
            facts = {"lost": swept.lost, "not_started": swept.not_started}
            _log.warning(
                "settled for silent gateways",
                extra={"facts": {**facts, "gateways": swept.gateways}},
            )

    return [
        Job(name="sweeper", every_ms=every_ms, run=sweep),
        Job(name="reaper", every_ms=reaper.every_ms, run=reaper.round),
        access_job(services),
        soft_caps_job(services),
        idempotency_job(services),
        Job(name="reconciler", every_ms=reconciler.every_ms, run=reconciler.round),
        *usage_jobs(services),
        responses_job(services),
        scaler_job(services),
        safety_job(services),
        rollouts_job(services),
        launch_job(services, launcher),
    ]


def sweep_every_ms(lease_ms: int) -> int:
    """Twice within a lease, and at least once a second."""
    return max(1, min(SWEEP_EVERY_MS_MAX, lease_ms // 2))


def sweeper_config(lease_ms: int) -> SweeperConfig:
    """A lease of silence, a lease of grace for the worker's journal."""
    gap_s = max(CONTACT_GAP_S_MIN, 3 * sweep_every_ms(lease_ms) / 1000)
    return SweeperConfig(contact_gap_s=gap_s, grace_ms=lease_ms, lease_ms=lease_ms)
