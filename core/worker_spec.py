"""What a deployment wants its workers to be started with, and as whose processes.

Only what may differ between deployments of one machine: addresses, secrets and directories are
their launcher's. A field that is null is left to the worker's own default. Pure.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import msgspec

from core.settings import env_name

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
CountOrNone = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class LauncherKind(StrEnum):
    """Who starts a deployment's replicas."""

    EXTERNAL = "external"  # nobody here: they register themselves
    LOCAL = "local"  # a control plane, as processes of its own machine


class WorkerSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Each field is the worker's setting of the same name; docs/settings.md says what it means."""

    threads: Count | None = None
    kv_blocks: Count | None = None
    kv_memory_mb: Count | None = None
    kv_memory_share: Share | None = None
    host_memory_mb: CountOrNone | None = None
    block_tokens: Count | None = None
    max_batched_tokens: Count | None = None
    max_sequences: Count | None = None
    waiting_tokens_max: CountOrNone | None = None
    batch_invariant: bool | None = None
    itl_target_ms: CountOrNone | None = None
    itl_stretch: Annotated[float, msgspec.Meta(ge=1, le=1000)] | None = None
    step_timeout_s: Count | None = None
    drain_timeout_s: Count | None = None
    journal_bytes_max: Count | None = None
    request_bytes_max: Count | None = None


def spec_environment(spec: WorkerSpec) -> Mapping[str, str]:
    """The worker's environment, as far as the deployment decides it.

    >>> spec_environment(WorkerSpec(threads=2, batch_invariant=True))
    {'HEADWORKS_THREADS': '2', 'HEADWORKS_BATCH_INVARIANT': 'true'}
    """
    told = msgspec.structs.asdict(spec).items()
    return {env_name(name): _word(value) for name, value in told if value is not None}


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
