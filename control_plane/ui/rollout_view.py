"""A rollout's two sides beside each other. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from control_plane.ui import formats

Row = Mapping[str, Any]


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a rollout, its two sides as text."""

    name: str
    canary: str
    stable: str


def sides(comparison: Row) -> list[Beside]:
    """Canary and stable beside each other, in the order in which one asks."""
    both = comparison["canary"], comparison["stable"]

    def beside(name: str, canary: str, stable: str) -> Beside:
        return Beside(name=name, canary=canary, stable=stable)

    rows = [
        beside("Requests", *(formats.count(side["requests"]) for side in both)),
        beside("Errors", *(formats.share(side["error_rate"]) for side in both)),
    ]
    for name, field, form in _COMPARED:
        rows.append(beside(f"{name} p95", *(form(side[field]["p95"]) for side in both)))
        rows.append(beside(f"{name} mean", *(form(side[field]["mean"]) for side in both)))
    for cause, name in (("length", "Cut by length"), ("filtered", "Filtered")):
        rows.append(beside(name, *(formats.share(_part(side, cause)) for side in both)))
    return rows


_COMPARED = (
    ("TTFT", "first_token_ms", formats.milliseconds),
    ("ITL", "inter_token_ms", formats.milliseconds),
    ("Output tokens", "output_tokens", formats.count),
    ("Cost", "cost_micro", formats.money),
)


def _part(side: Row, cause: str) -> float | None:
    requests = side["requests"]
    return side["causes"].get(cause, 0) / requests if requests else None
