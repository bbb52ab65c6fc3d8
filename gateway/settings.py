"""What a gateway is told at its start. Units are in the names.

The one invariant: every wait, queue, buffer and retry that this process knows has its bound
here, or in the limits built from it.
"""

import msgspec

from core.internal_token import SECRET_BYTES_MIN
from core.log import Level
from core.secrets import read_key_ring
from core.settings import SettingsError, env_name


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Read once in `__main__` from `HEADWORKS_…`."""

    database_url: str
    redis_url: str
    internal_secret: str
    key_pepper: str
    models_dir: str
    spool_dir: str
    region: str = "local"
    log_level: Level = "INFO"
    gateway_host: str = "127.0.0.1"
    gateway_port: int = 8000

    valkey_call_ms: int = 1_000  # unanswered, before this gateway decides alone
    lease_ms: int = 5_000  # of this incarnation; asserted three times in it
    poll_ms: int = 500  # of keys, tenants, routes and replicas
    start_timeout_ms: int = 30_000  # for Postgres to answer at the start

    body_bytes_max: int = 32 * 1024 * 1024
    body_timeout_ms: int = 60_000  # for a whole request body to arrive
    image_bytes_max: int = 5 * 1024 * 1024  # of each of a request's images
    images_max: int = 100  # of one request
    head_bytes_max: int = 65_536  # of a request's line and headers
    head_timeout_ms: int = 20_000
    keep_alive_ms: int = 75_000  # an idle client connection
    exchanges_max: int = 2_048  # requests under way; further ones get 503
    connections_max: int = 8_192

    deadline_ms_max: int = 600_000  # and the deadline of a request that names none
    first_token_ms_max: int = 600_000  # until an answer's first token
    idle_ms_max: int = 120_000  # between an answer's tokens: one death of a replica and more
    output_tokens_max: int = 0  # of one answer; 0 leaves it to the model
    reserve_output_tokens: int = 1_024  # a hard-capped tenant's first reservation
    headers_wait_ms: int = 10_000  # a stream's headers wait so long for the engine to start
    ping_ms: int = 10_000  # between signs of life in a silent stream
    slow_reader_ms: int = 30_000  # a client that takes no byte for so long is cut
    deaths_max: int = 3  # of replicas, under one request
    nacked_ms: int = 60_000  # of being declined again and again, before a request is refused
    unsent_ms: int = 15_000  # of trying replicas that cannot be reached
    binding_idle_ms: int = 3_600_000  # a conversation is remembered so long after its last request
    no_replica_ms: int = 10_000  # without a ready replica, before a model's requests are refused
    share_standard: int = 100  # of what higher classes are given, in thousandths, kept for it
    share_batch: int = 10
    breaker_failures: int = 3  # in ten seconds, and half of all, before a replica is passed over
    breaker_open_ms: int = 1_000  # at first, before it is tried again
    retry_permille: int = 200  # of the fleet's requests: retries and resumes after deaths
    retry_floor: int = 50  # and so many in ten seconds in any case
    death_refused_ms: int = 600_000  # a request under which two replicas died

    worker_connect_ms: int = 2_000
    worker_head_ms: int = 10_000
    worker_first_frame_ms: int = 60_000
    worker_idle_ms: int = 60_000
    worker_abort_ms: int = 1_000

    provider_keys: str = ""  # that providers' keys are sealed with, `id:base64,…`

    responses_days: int = 30  # that a response is kept
    responses_keys: str = ""  # that it is sealed with, `id:base64,…`; empty leaves it open

    idempotency_kept_ms: int = 86_400_000  # a key, from its last claim on
    idempotency_bytes_max: int = 1_048_576  # of an answer that is kept for one
    answer_cache_slots: int = 1_024  # answers of one tenant that may be given again
    answer_cache_bytes_max: int = 65_536  # of each

    auth_stale_ms: int = 900_000  # rows serve so long with Postgres away
    spool_bytes_max: int = 256 * 1024 * 1024
    checkpoint_ms: int = 10_000  # of streams at least so old, and so often
    drain_ms: int = 20_000  # at SIGTERM, for answers to end by themselves
    settle_ms: int = 10_000  # then, for them to be settled


MAY_BE_ZERO = frozenset({"gateway_port", "output_tokens_max", "retry_permille", "retry_floor"})


def checked(settings: GatewaySettings) -> GatewaySettings:
    """The same settings, or SettingsError for a value that would be unsafe to start with."""
    if len(settings.internal_secret.encode()) < SECRET_BYTES_MIN:
        name = env_name("internal_secret")
        raise SettingsError(f"{name} is shorter than {SECRET_BYTES_MIN} bytes")
    for name in ("provider_keys", "responses_keys"):
        try:
            read_key_ring(getattr(settings, name))
        except ValueError as error:
            raise SettingsError(f"{env_name(name)}: {error}") from error
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        least = 0 if field.name in MAY_BE_ZERO else 1
        if isinstance(value, int) and value < least:
            raise SettingsError(f"{env_name(field.name)} must be at least {least}")
    return settings
