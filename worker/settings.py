"""The worker's settings, read once in `__main__`."""

from pathlib import Path

import msgspec


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
    log_level: str = "INFO"
    worker_host: str = "127.0.0.1"
    worker_port: int = 8100
    worker_url: str = ""  # as gateways reach it; "" is http://<host>:<port>
    # The engine.
    threads: int = 0  # 0: one for each core
    kv_blocks: int = 0  # 0: from kv_memory_mb
    kv_memory_mb: int = 512
    block_tokens: int = 16
    max_batched_tokens: int = 512
    max_sequences: int = 64
    # Bounds.
    drain_timeout_s: int = 10
    journal_bytes_max: int = 256 * 1024 * 1024
    request_bytes_max: int = 64 * 1024 * 1024

    @property
    def url(self) -> str:
        """The address this worker registers."""
        return self.worker_url or f"http://{self.worker_host}:{self.worker_port}"
