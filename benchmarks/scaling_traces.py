"""Public traces as `simulator.scaling_traces` has them: whatever of them a directory holds.

Lengths that are beyond the simulated machine are scaled down, hours of ServeGen's two days are
compressed and its rates brought to what a dozen replicas bear; what was done is in the name.
"""

import csv
import datetime as dt
import json
from collections import defaultdict
from pathlib import Path

from simulator.scaling_traces import CONVERSATION, Asked, Trace, poisson

MOONCAKE_SCALE = 8  # its prompts are of 12,000 tokens
SERVEGEN_HOURS = 12  # of its time in one of ours
SERVEGEN_MEAN = 3.0  # requests a second


def public_traces(directory: Path) -> dict[str, Trace]:
    """By name; a file that is not there is left out."""
    found: dict[str, Trace] = {}
    for kind in ("code", "conv"):
        path = directory / f"AzureLLMInferenceTrace_{kind}_2023.csv"
        if path.exists():
            found[f"azure_{kind}"] = _azure(path)
    for kind in ("conversation", "synthetic"):
        path = directory / f"mooncake_{kind}_trace.jsonl"
        if path.exists():
            found[f"mooncake_{kind}_by_{MOONCAKE_SCALE}"] = _mooncake(path)
    path = directory / "servegen_m-small_clients_2days.csv"
    if path.exists():
        found[f"servegen_2days_by_{SERVEGEN_HOURS}"] = _servegen(path)
    return found


def _azure(path: Path) -> Trace:
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    times = [dt.datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    asked = [
        Asked(
            int((at - times[0]).total_seconds() * 1_000),
            int(row["ContextTokens"]),
            max(1, int(row["GeneratedTokens"])),
        )
        for at, row in zip(times, rows, strict=True)
    ]
    return tuple(sorted(asked, key=lambda one: one.at_ms))


def _mooncake(path: Path) -> Trace:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    asked = [
        Asked(
            int(row["timestamp"]),
            max(1, row["input_length"] // MOONCAKE_SCALE),
            max(1, row["output_length"]),
        )
        for row in rows
    ]
    return tuple(sorted(asked, key=lambda one: one.at_ms))


def _servegen(path: Path) -> Trace:
    rates: dict[int, float] = defaultdict(float)
    with path.open() as lines:
        for row in csv.DictReader(lines):
            rates[int(float(row["window_start_s"]))] += float(row["rate_rps"])
    first, last = min(rates), max(rates)
    mean = sum(rates.values()) / len(rates)
    scaled = {(at - first) // 600: SERVEGEN_MEAN * rate / mean for at, rate in rates.items()}
    window_s = 600 / SERVEGEN_HOURS
    seconds = (last - first + 600) / SERVEGEN_HOURS

    def rate(at_s: float) -> float:
        return scaled.get(int(at_s / window_s), 0.0)

    return poisson(1, seconds, rate, max(scaled.values()), CONVERSATION)
