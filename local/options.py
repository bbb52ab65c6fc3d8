"""What may be chosen about a local stack."""

from pathlib import Path

import msgspec

from artifacts.manifest import ComputeDtype

GATEWAY_PORT_STEP = 10  # a second gateway listens ten above the first


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line choices; the defaults are `make up`."""

    data: Path
    models: Path | None = None  # None: inside `data`
    host: str = "127.0.0.1"
    gateway_port: int = 8000
    control_plane_port: int = 8001
    worker_port: int = 8100
    gateways: int = 1
    workers: int = 1
    model: str = "smollm2-135m-instruct"
    dtype: ComputeDtype | None = None  # None: what this machine is faster in
    lease_ms: int | None = None  # None: HEADWORKS_LEASE_MS, else the gateway's default
    database_url: str = ""  # "": embedded
    redis_url: str = ""  # "": embedded

    @property
    def gateway_ports(self) -> list[int]:
        """One for each gateway."""
        return [self.gateway_port + GATEWAY_PORT_STEP * i for i in range(self.gateways)]

    @property
    def worker_ports(self) -> list[int]:
        """One for each worker."""
        return [self.worker_port + i for i in range(self.workers)]
