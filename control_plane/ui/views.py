"""What pages show, worked out from what the admin API answers. Pure: JSON in, plain values out."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from control_plane.ui import formats

Row = Mapping[str, Any]
Points = Sequence[Row]

SERVING = "ready"
GONE = ("stopped", "lost")


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number with its name; `tone` is '' for one that needs nobody, else good, warn or bad."""

    name: str
    value: str
    note: str = ""
    tone: str = ""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Lines over the same times. `said` is the chart as a sentence, for those who hear it."""

    title: str
    unit: str
    times_s: list[int]
    lines: dict[str, list[float | None]]
    said: str

    @property
    def json(self) -> str:
        """For the script that draws it."""
        return msgspec.json.encode(
            {"unit": self.unit, "times": self.times_s, "lines": self.lines}
        ).decode()


def pulse_figures(points: Points, span_ms: int) -> list[Figure]:
    """The last minutes in six numbers."""
    ended = sum(p["requests"] for p in points)
    good = sum(p["good"] for p in points)
    failed = sum(p["failed"] for p in points)
    tokens = sum(p["output_tokens"] for p in points)
    cost = sum(p["cost_micro"] for p in points)
    read = sum(p["prompt_tokens"] for p in points)
    cached = sum(p["cached_tokens"] for p in points)
    seconds = span_ms / 1_000
    return [
        Figure(
            name="Goodput",
            value=formats.rate(good / seconds),
            note=f"{formats.count(ended)} requests ended",
        ),
        Figure(
            name="Failed",
            value=formats.share(failed / ended if ended else None),
            note=f"{formats.count(failed)} of ours, no fault of the caller",
            tone="bad" if failed and failed / ended > BAD_SHARE else "",
        ),
        Figure(
            name="TTFT p95",
            value=formats.milliseconds(_last(points, "ttft_ms_p95")),
            note=f"p50 {formats.milliseconds(_last(points, 'ttft_ms_p50'))}",
        ),
        Figure(
            name="ITL p95",
            value=formats.milliseconds(_last(points, "itl_ms_p95")),
            note=f"p50 {formats.milliseconds(_last(points, 'itl_ms_p50'))}",
        ),
        Figure(
            name="Output",
            value=formats.rate(tokens / seconds),
            note=f"tokens; {formats.share(cached / read if read else None)} of prompts from cache",
        ),
        Figure(
            name="Per million",
            value=formats.money(cost / tokens * 1_000_000 if tokens else None),
            note="billed, over output tokens",
        ),
    ]


BAD_SHARE = 0.01


def pulse_charts(picture: Row) -> list[Chart]:
    """Goodput, first tokens, inter-token times and tokens; a step without a request is a gap."""
    points, step_ms = picture["points"], picture["step_ms"]
    by_time = {p["at_ms"]: p for p in points}
    # The last step is still being made, so it would always look like a fall.
    times = range(picture["from_ms"], picture["as_of_ms"] - step_ms, step_ms)
    steps = [by_time.get(at_ms, {}) for at_ms in times]
    times_s = [at_ms // 1_000 for at_ms in times]
    seconds = step_ms / 1_000

    def rate(field: str) -> list[float | None]:
        return [step.get(field, 0) / seconds for step in steps]

    def level(field: str) -> list[float | None]:
        return [step.get(field) for step in steps]

    return [
        _chart("Goodput", "req/s", times_s, {"good": rate("good"), "failed": rate("failed")}),
        _chart("Output", "tok/s", times_s, {"tokens": rate("output_tokens")}),
        _chart(
            "Time to first token",
            "ms",
            times_s,
            {"p50": level("ttft_ms_p50"), "p95": level("ttft_ms_p95")},
        ),
        _chart(
            "Inter-token time",
            "ms",
            times_s,
            {"p50": level("itl_ms_p50"), "p95": level("itl_ms_p95")},
        ),
    ]


def _chart(
    title: str, unit: str, times_s: list[int], lines: dict[str, list[float | None]]
) -> Chart:
    told = []
    for name, values in lines.items():
        known = [value for value in values if value is not None]
        if known:
            told.append(
                f"{name} now {formats.count(known[-1])}, at most {formats.count(max(known))} {unit}"
            )
    said = f"{title}: {'; '.join(told) or 'nothing measured'}"
    return Chart(title=title, unit=unit, times_s=times_s, lines=lines, said=said)


def _last(points: Points, field: str) -> float | None:
    return next((p[field] for p in reversed(points) if p[field] is not None), None)


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


FULL = 0.9


DAY_MS = 86_400_000


def usage_chart(found: Row) -> Chart:
    """Prompt and output tokens by day, up to today."""
    of = {total["bucket_ms"]: total for total in found["totals"]}
    until_ms = max([found["fresh_as_of_ms"], *of]) if of else found["fresh_as_of_ms"]
    days = list(range(found["from_ms"], min(until_ms + 1, found["to_ms"]), DAY_MS))

    def by_day(field: str) -> list[float | None]:
        return [of[day][field] if day in of else 0 for day in days]

    lines = {"prompt": by_day("prompt_tokens"), "output": by_day("output_tokens")}
    return _chart("Tokens by day", "tokens", [day // 1_000 for day in days], lines)


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
