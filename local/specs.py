"""The command lines and environments of our own processes."""

import sys
from collections.abc import Mapping
from pathlib import Path

from local.layout import Layout
from local.options import Options
from local.process import ProcessSpec
from local.secrets import Secrets
from local.seed import REGION

ROOT = Path(__file__).parents[1]
# On one machine nobody takes over what is drained, and somebody waits at the terminal.
DRAIN = {
    "HEADWORKS_DRAIN_MS": "8000",
    "HEADWORKS_SETTLE_MS": "5000",
    "HEADWORKS_DRAIN_TIMEOUT_S": "8",
}
# A gateway drains, settles twice over and closes, each within its bound: 19 s and what it
# takes to close. Killed before that, it leaves its work to be found by lease.
STOP_TIMEOUT_S = 40.0


class Specs:
    """Specs for one stack.

    `environ` is passed through, so HEADWORKS_* may tune a process; what processes must agree
    on with the stack is ours.
    """

    def __init__(
        self,
        options: Options,
        secrets: Secrets,
        environ: Mapping[str, str],
        *,
        database_url: str,
        redis_url: str,
    ) -> None:
        self._options = options
        self._layout = Layout(options.data, options.models)
        self._shared = {
            **DRAIN,
            **environ,
            "HEADWORKS_INTERNAL_SECRET": secrets.internal_secret,
            "HEADWORKS_REGION": REGION,
            "HEADWORKS_MODELS_DIR": str(self._layout.models),
            "PYTHONUNBUFFERED": "1",
        }
        if options.lease_ms is not None:
            self._shared["HEADWORKS_LEASE_MS"] = str(options.lease_ms)
        self._stores = {
            "HEADWORKS_DATABASE_URL": database_url,
            "HEADWORKS_REDIS_URL": redis_url,
            "HEADWORKS_KEY_PEPPER": secrets.key_pepper,
        }
        self._admin_token = secrets.admin_token

    @property
    def control_plane_url(self) -> str:
        """Where operators and workers reach it."""
        return f"http://{self._options.host}:{self._options.control_plane_port}"

    def control_plane(self) -> ProcessSpec:
        """The one control plane."""
        own = {
            "HEADWORKS_ADMIN_TOKEN": self._admin_token,
            "HEADWORKS_CONTROL_PLANE_HOST": self._options.host,
            "HEADWORKS_CONTROL_PLANE_PORT": str(self._options.control_plane_port),
            "HEADWORKS_GATEWAY_URL": f"http://{self._options.host}:{self._options.gateway_port}",
        }
        return self._spec("control-plane", "control_plane", {**self._stores, **own})

    def gateway(self, index: int) -> ProcessSpec:
        """One of the gateways; they share the spool directory, each with a file of its own."""
        own = {
            "HEADWORKS_GATEWAY_HOST": self._options.host,
            "HEADWORKS_GATEWAY_PORT": str(self._options.gateway_ports[index]),
            "HEADWORKS_SPOOL_DIR": str(self._layout.spool),
        }
        return self._spec(_numbered("gateway", index), "gateway", {**self._stores, **own})

    def worker(self, index: int, *, deployment: str, version: str) -> ProcessSpec:
        """One worker: no database, no Valkey."""
        replica = f"local-{index}"
        own = {
            "HEADWORKS_CONTROL_PLANE_URL": self.control_plane_url,
            "HEADWORKS_DEPLOYMENT": deployment,
            "HEADWORKS_REPLICA_ID": replica,
            "HEADWORKS_MODEL_VERSION": version,
            "HEADWORKS_JOURNAL_DIR": str(self._layout.journal(replica)),
            "HEADWORKS_WORKER_HOST": self._options.host,
            "HEADWORKS_WORKER_PORT": str(self._options.worker_ports[index]),
            # Threads that spin while they wait for each other take the gateway's cores: a
            # decode step of 0.1 s then takes seconds. On a machine of its own a worker is
            # quicker with OpenMP's default.
            "OMP_WAIT_POLICY": self._shared.get("OMP_WAIT_POLICY", "passive"),
        }
        return self._spec(_numbered("worker", index), "worker", own)

    def _spec(self, name: str, module: str, own: Mapping[str, str]) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", module),
            cwd=ROOT,
            env={**self._shared, **own},
            stop_timeout_s=STOP_TIMEOUT_S,
        )


def _numbered(name: str, index: int) -> str:
    return name if index == 0 else f"{name}-{index + 1}"
