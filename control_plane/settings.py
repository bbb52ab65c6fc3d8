"""What the control plane is told at its start. Units are in the names.

The one invariant: every wait, queue and body that this process knows has its bound here.
"""

import msgspec

from core.internal_token import SECRET_BYTES_MIN
from core.log import Level
from core.secrets import read_key_ring
from core.settings import SettingsError, env_name
from store.redis_client import parse_address

MAY_BE_ZERO = frozenset({"control_plane_port", "usage_kept_months"})


class ControlPlaneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Read once in `__main__` from `HEADWORKS_…`."""

    database_url: str
    redis_url: str
    internal_secret: str
    key_pepper: str
    admin_token: str
    provider_keys: str = ""  # that providers' keys are sealed with, `id:base64,…`
    log_level: Level = "INFO"
    control_plane_host: str = "127.0.0.1"
    control_plane_port: int = 8001

    lease_ms: int = 5000  # of a gateway incarnation; the sweeper runs twice in it
    beat_interval_ms: int = 1000  # told to workers when they register
    replica_lost_ms: int = 10_000  # silence after which a replica is asked, then marked lost
    replica_kept_ms: int = 86_400_000  # a stopped or lost replica's row, after its last beat
    replica_drain_ms: int = 600_000  # for what runs on a replica that is drained from here
    replica_stalled_ms: int = 180_000  # without a step, with work: then it is replaced
    replica_start_ms: int = 900_000  # from its start to ready, weights fetched and loaded

    launcher_dir: str = ""  # where workers that we start keep their things; "": we start none
    launcher_command: str = ""  # of a worker, as a shell would split it; "": python -m worker
    launcher_models_dir: str = ""  # "": launcher_dir/models
    launcher_host: str = "127.0.0.1"
    launcher_port: int = 8200  # of the first worker; each has the next one
    launcher_replicas_max: int = 8  # at once, and so many ports
    launcher_control_plane_url: str = ""  # as workers reach us; "" is http://<host>:<port>
    launcher_stop_ms: int = 15_000  # from asking a process to end until it is killed
    launcher_every_ms: int = 1000  # between two looks at what is wanted and what there is

    journal_chunk: int = 200  # entries reconciled before each acknowledgement
    journal_entries_max: int = 2000  # in one message
    body_bytes_max: int = 8 * 1024 * 1024

    probe_timeout_ms: int = 1000  # for one replica's GET /load
    probes_at_once: int = 16
    push_timeout_ms: int = 200  # telling Valkey of a new version; gateways poll anyway
    ready_timeout_ms: int = 1000
    check_timeout_ms: int = 60_000  # for `check` to read the books
    request_ms_max: int = 3_600_000  # an older open reservation is a fault whoever holds it

    reconcile_every_ms: int = 5000  # half of it at most is spent
    reconcile_slice: int = 1000  # requests or accounts compared in one transaction
    # No transaction that records a word lasts so long, its recount included.
    reconcile_grace_ms: int = 30_000
    reconcile_overdue_ms: int = 600_000  # for a request's journals, and a word's reservation
    reconcile_revisit_ms: int = 60_000  # before an open difference is looked at again
    spool_patience_ms: int = 300_000  # for a gateway's spool to drain
    difference_kept_ms: int = 2_592_000_000  # one that is over

    usage_rollup_ms: int = 5000  # between rounds; half of it at most is spent
    usage_kept_months: int = 0  # whole months of requests beside the current one; 0 keeps all

    backoff_max_ms: int = 30_000  # between two tries of a failing background job
    job_timeout_ms: int = 30_000  # one run of a background job
    shutdown_ms: int = 10_000  # for requests and jobs in flight at SIGTERM


def checked(settings: ControlPlaneSettings) -> ControlPlaneSettings:
    """The same settings, or SettingsError for a value that would be unsafe to start with."""
    for name in ("internal_secret", "key_pepper", "admin_token"):
        if len(getattr(settings, name).encode()) < SECRET_BYTES_MIN:
            raise SettingsError(f"{env_name(name)} is shorter than {SECRET_BYTES_MIN} bytes")
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, int) and value < 1 and field.name not in MAY_BE_ZERO:
            raise SettingsError(f"{env_name(field.name)} must be at least 1")
    if not settings.database_url.startswith(("postgresql://", "postgres://")):
        raise SettingsError(f"{env_name('database_url')} is not a postgresql:// address")
    try:
        read_key_ring(settings.provider_keys)
    except ValueError as error:
        raise SettingsError(f"{env_name('provider_keys')}: {error}") from error
    try:
        parse_address(settings.redis_url)
    except ValueError as error:
        raise SettingsError(f"{env_name('redis_url')}: {error}") from error
    return settings
