"""What the control plane is told at its start. Units are in the names.

The one invariant: every wait, queue and body that this process knows has its bound here.
"""

import msgspec

from control_plane.access.oidc_claims import read_roles
from control_plane.access.origins import is_private
from core.internal_token import SECRET_BYTES_MIN
from core.log import Level
from core.secrets import read_key_ring
from core.settings import SettingsError, env_name
from store.redis_client import parse_address

MAY_BE_ZERO = frozenset({"control_plane_port", "usage_kept_months", "safety_hits_days"})


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
    gateway_url: str = "http://127.0.0.1:8000"  # for the console's playground

    public_url: str = ""  # where browsers reach it, `https://ops.example.com`
    session_idle_ms: int = 7_200_000  # a session ends so long after its last use
    session_life_ms: int = 43_200_000  # and so long after it began in any case
    sessions_max: int = 10  # of one user; the oldest ends
    invitation_ms: int = 259_200_000
    tokens_max: int = 100  # of one user, alive
    argon2_time_cost: int = 3  # RFC 9106's second choice
    argon2_memory_kib: int = 65_536
    argon2_lanes: int = 4
    argon2_at_once: int = 2
    argon2_waiting_max: int = 64
    sign_in_free: int = 5  # failures of a user before the next try waits
    sign_in_address_free: int = 20  # and of an address
    sign_in_first_ms: int = 1000  # the first wait; each failure doubles it
    sign_in_most_ms: int = 900_000
    sign_in_forget_ms: int = 3_600_000  # after the last failure they are forgotten

    oidc_issuer: str = ""  # empty: no sign-in through an identity provider
    oidc_client_id: str = ""
    oidc_client_secret: str = ""
    oidc_scopes: str = "openid email profile"
    oidc_domains: str = ""  # of email addresses that are let in, `example.com,…`; empty is any
    oidc_groups_claim: str = "groups"
    oidc_roles: str = ""  # what groups make of their members, `sre=operator,…`
    oidc_timeout_ms: int = 5000

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
    safety_hits_days: int = 90  # what safety policies did, with its text; 0 keeps all

    rollout_every_ms: int = 2000  # between two looks at rollouts under way

    scaling_every_ms: int = 5000  # between two rounds of the autoscaler
    scaling_kept_ms: int = 2_592_000_000  # a decision of it

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
    if settings.argon2_memory_kib < 8 * settings.argon2_lanes:
        raise SettingsError(f"{env_name('argon2_memory_kib')} must be 8 for each lane or more")
    _check_oidc(settings)
    try:
        read_key_ring(settings.provider_keys)
    except ValueError as error:
        raise SettingsError(f"{env_name('provider_keys')}: {error}") from error
    try:
        parse_address(settings.redis_url)
    except ValueError as error:
        raise SettingsError(f"{env_name('redis_url')}: {error}") from error
    return settings


def _check_oidc(settings: ControlPlaneSettings) -> None:
    if settings.public_url and not is_private(settings.public_url):
        raise SettingsError(f"{env_name('public_url')} must be https, or this machine")
    try:
        read_roles(settings.oidc_roles)
    except ValueError as error:
        raise SettingsError(f"{env_name('oidc_roles')}: {error}") from error
    if not settings.oidc_issuer:
        return
    if not is_private(settings.oidc_issuer):
        raise SettingsError(f"{env_name('oidc_issuer')} must be https, or this machine")
    for name in ("public_url", "oidc_client_id", "oidc_client_secret"):
        if not getattr(settings, name):
            raise SettingsError(f"{env_name(name)} is needed with {env_name('oidc_issuer')}")
