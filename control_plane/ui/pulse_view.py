"""The last minutes as the overview shows them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from control_plane.ui import formats
from control_plane.ui.figures import Chart, Figure, chart

BAD_SHARE = 0.01  # of requests that failed

Row = Mapping[str, Any]
Points = Sequence[Row]


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
        chart("Goodput", "req/s", times_s, {"good": rate("good"), "failed": rate("failed")}),
        chart("Output", "tok/s", times_s, {"tokens": rate("output_tokens")}),
        chart(
            "Time to first token",
            "ms",
            times_s,
            {"p50": level("ttft_ms_p50"), "p95": level("ttft_ms_p95")},
        ),
        chart(
            "Inter-token time",
            "ms",
            times_s,
            {"p50": level("itl_ms_p50"), "p95": level("itl_ms_p95")},
        ),
    ]


def _last(points: Points, field: str) -> float | None:
    return next((p[field] for p in reversed(points) if p[field] is not None), None)
