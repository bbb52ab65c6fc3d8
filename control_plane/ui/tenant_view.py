"""Usage, limits and routes as pages show them. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from control_plane.ui import formats
from control_plane.ui.figures import Chart, chart

DAY_MS = 86_400_000

Row = Mapping[str, Any]


def usage_chart(found: Row) -> Chart:
    """Prompt and output tokens by day, up to today."""
    of = {total["bucket_ms"]: total for total in found["totals"]}
    until_ms = max([found["fresh_as_of_ms"], *of]) if of else found["fresh_as_of_ms"]
    days = list(range(found["from_ms"], min(until_ms + 1, found["to_ms"]), DAY_MS))

    def by_day(field: str) -> list[float | None]:
        return [of[day][field] if day in of else 0 for day in days]

    lines = {"prompt": by_day("prompt_tokens"), "output": by_day("output_tokens")}
    return chart("Tokens by day", "tokens", [day // 1_000 for day in days], lines)


def route_summary(route: Row) -> str:
    """Where a public name leads, in a line."""
    if route.get("alias"):
        return f"alias of {route['alias']}"
    targets = route.get("targets") or []
    weights = sum(target.get("weight", 1) for target in targets) or 1
    told = [
        f"{target.get('deployment') or target.get('provider', '') + '/' + target.get('model', '')}"
        f" {100 * target.get('weight', 1) / weights:.3g} %"
        for target in targets
    ]
    fallbacks = len(route.get("fallbacks") or [])
    return ", ".join(told) + (f" · {fallbacks} fallbacks" if fallbacks else "")


def held(limits: Row) -> list[tuple[str, str]]:
    """Limits that say something, the tenant's own first, as names and values."""
    told = []
    for scope, said in limits.items():
        for name, value in _said(said):
            words = name.replace("_", " ")
            told.append((words if scope == "tenant" else f"{scope}: {words}", value))
    return told


def _said(said: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(said, Mapping):
        for name, value in said.items():
            yield from _said(value, f"{prefix} {name}".strip())
    elif isinstance(said, int) and not isinstance(said, bool) and said:
        yield prefix, formats.count(said)
