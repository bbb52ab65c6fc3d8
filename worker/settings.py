"""The worker's settings, read once in `__main__`, and what makes them unsafe to start with."""

import re
from pathlib import Path

import msgspec

from core.internal_token import SECRET_BYTES_MIN
from core.log import Level
from core.settings import SettingsError, env_name


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is an environment variable; see docs/settings.md."""

    internal_secret: str
    deployment: str = ""  # "": <model>-<first 8 of the hash>
    replica_id: str
    models_dir: Path
    model_version: str  # a hash, or a name in the store
    journal_dir: Path
    control_plane_url: str
    region: str = "local"
    log_level: Level = "INFO"
    worker_host: str = "127.0.0.1"
    worker_port: int = 8100
    worker_url: str = ""  # as gateways reach it; "" is http://<host>:<port>
    # The engine.
    threads: int = 0  # 0: one for each core that affinity and cgroups allow
    kv_blocks: int = 0  # 0: from kv_memory_mb
    kv_memory_mb: int = 0  # 0: from kv_memory_share
    kv_memory_share: float = 0.1  # of what is free once the weights and a largest step have theirs
    host_memory_mb: int = 0  # for KV that is evicted or preempted; 0 is none
    block_tokens: int = 16
    max_batched_tokens: int = 512
    max_sequences: int = 64
    waiting_tokens_max: int = 0  # of prompts that wait; 0: one step's, for gateways queue better
    batch_invariant: bool = False  # a sequence's logits are the same bits in any company; slower
    itl_target_ms: int = 0  # that a step with prefill beside decodes may take; 0: by itl_stretch
    itl_stretch: float = 1.6  # with prompts over a step: so many times the decodes alone; 0: any
    # Bounds.
    step_timeout_s: int = 60  # or ten times the slowest step of its size, if that is longer
    drain_timeout_s: int = 10
    journal_bytes_max: int = 256 * 1024 * 1024
    request_bytes_max: int = 64 * 1024 * 1024

    @property
    def url(self) -> str:
        """The address this worker registers."""
        return self.worker_url or f"http://{self.worker_host}:{self.worker_port}"


MAY_BE_ZERO = frozenset({
    "worker_port", "threads", "kv_blocks", "kv_memory_mb", "host_memory_mb", "itl_target_ms",
    "waiting_tokens_max",
})  # fmt: skip

# It is a field of an internal token, which dots separate, and a key of the control plane's.
_REPLICA_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def checked(settings: WorkerSettings) -> WorkerSettings:
    """The same settings, or SettingsError for a value that would be unsafe to start with."""
    if len(settings.internal_secret.encode()) < SECRET_BYTES_MIN:
        name = env_name("internal_secret")
        raise SettingsError(f"{name} is shorter than {SECRET_BYTES_MIN} bytes")
    if not _REPLICA_ID.fullmatch(settings.replica_id):
        name = env_name("replica_id")
        raise SettingsError(f"{name} must be 1 to 128 of A-Z a-z 0-9 _ -, the first no _ or -")
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        least = 0 if field.name in MAY_BE_ZERO else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise SettingsError(f"{env_name(field.name)} must be at least {least}")
    if not 0 < settings.kv_memory_share <= 1:
        raise SettingsError(f"{env_name('kv_memory_share')} must be over 0, and at most 1")
    if settings.itl_stretch and not settings.itl_stretch >= 1:
        raise SettingsError(f"{env_name('itl_stretch')} must be 0 or at least 1")
    return settings
