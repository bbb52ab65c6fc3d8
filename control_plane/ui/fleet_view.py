"""Deployments with their replicas, as pages show them. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from control_plane.ui import formats
from control_plane.ui.figures import Figure

SERVING = "ready"
GONE = ("stopped", "lost")
FULL = 0.9  # of the KV blocks

Row = Mapping[str, Any]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment with its replicas; those that are gone come last."""

    deployment: Row
    replicas: list[Row]
    ready: int
    running: int
    waiting: int
    kv_used: float | None  # of the ready ones' blocks

    @property
    def tone(self) -> str:
        """Whether somebody should look."""
        if self.deployment["desired_state"] != "running":
            return ""
        return "good" if self.ready else "bad"


def pools(deployments: Iterable[Row], replicas: Iterable[Row]) -> list[Pool]:
    """In order of name. A replica of a deployment that is not listed is left out."""
    of: dict[str, list[Row]] = defaultdict(list)
    for replica in replicas:
        of[replica["deployment"]].append(replica)
    return [_pool(d, of[d["name"]]) for d in sorted(deployments, key=lambda d: str(d["name"]))]


def _pool(deployment: Row, replicas: list[Row]) -> Pool:
    ready = [r for r in replicas if r["state"] == SERVING]
    blocks = sum(r["kv_blocks"] for r in ready)
    free = sum(r["kv_blocks_free"] for r in ready)
    return Pool(
        deployment=deployment,
        replicas=sorted(replicas, key=lambda r: (r["state"] in GONE, r["replica_id"])),
        ready=len(ready),
        running=sum(r["running"] for r in ready),
        waiting=sum(r["waiting"] for r in ready),
        kv_used=1 - free / blocks if blocks else None,
    )


def fleet_figures(found: Iterable[Pool]) -> list[Figure]:
    """What the fleet is doing now."""
    there = list(found)
    wanted = [p for p in there if p.deployment["desired_state"] == "running"]
    dark = [p for p in wanted if not p.ready]
    kv = [p.kv_used for p in wanted if p.kv_used is not None]
    return [
        Figure(
            name="Replicas ready",
            value=str(sum(p.ready for p in there)),
            note=f"{len(dark)} of {len(wanted)} deployments have none" if dark else "everywhere",
            tone="bad" if dark else "",
        ),
        Figure(
            name="In flight",
            value=formats.count(sum(p.running for p in there)),
            note=f"{formats.count(sum(p.waiting for p in there))} wait in workers",
        ),
        Figure(
            name="KV in use",
            value=formats.share(max(kv) if kv else None),
            note="of the fullest deployment",
            tone="warn" if kv and max(kv) > FULL else "",
        ),
    ]
