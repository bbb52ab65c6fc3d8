"""Autoscalers beside each other in virtual time: SLO, replica time, turns and cost. JSON.

Drives the real decision (`control_plane.scaling`) and two others over generated shapes, and
over public traces where `--traces` names a directory with them. All have the same bounds,
machines and rounds, begin with `min_replicas` and know nothing of the load. `ratios` are ours
over each other's: replica hours, turns, and first tokens that came too late.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --seeds 1 2 3 --traces ../shared/traces --table
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.scaling_traces import public_traces
from control_plane.scaling.policy import ScalingPolicy
from simulator.scaling import Concurrency, Ours, Outcome, Scaler, Threshold, run
from simulator.scaling_fleet import Machine
from simulator.scaling_traces import SHAPES, Trace

POLICY = ScalingPolicy(
    deployment="simulated",
    min_replicas=1,
    max_replicas=12,
    cold_start_prior_ms=60_000,
    replica_hour_micro=2_000_000,
)
DAY_MS = 7_200_000  # of the diurnal shape
SERVEGEN_DAY_MS = 7_200_000  # its days are compressed twelve times


def main() -> None:
    given = _parser().parse_args()
    traces = {(shape, seed): SHAPES[shape](seed) for shape in SHAPES for seed in given.seeds}
    if given.traces:
        traces |= {(name, 0): trace for name, trace in public_traces(given.traces).items()}
    results: dict[str, dict[str, list[Outcome]]] = {}
    for (name, _), trace in traces.items():
        for scaler, outcome in _side_by_side(name, trace).items():
            results.setdefault(name, {}).setdefault(scaler, []).append(outcome)
    report = {name: _summary(outcomes) for name, outcomes in results.items()}
    if given.table:
        _print_table(report)
    else:
        print(json.dumps({"policy": msgspec.to_builtins(POLICY), "traces": report}, indent=2))


def _side_by_side(name: str, trace: Trace) -> dict[str, Outcome]:
    policy = POLICY
    if name == "idle_then":
        policy = msgspec.structs.replace(policy, min_replicas=0)
    if name == "diurnal" or name.startswith("servegen"):
        policy = msgspec.structs.replace(policy, season_ms=DAY_MS)
    warm = msgspec.structs.replace(policy, warm_replicas=2)
    scalers: dict[str, tuple[ScalingPolicy, Scaler]] = {
        "ours": (policy, Ours(policy)),
        "ours_warm_2": (warm, Ours(warm)),
        "threshold": (policy, Threshold(policy)),
        "concurrency": (policy, Concurrency(policy)),
    }
    return {who: run(trace, one, scaler, Machine()) for who, (one, scaler) in scalers.items()}


def _summary(outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    means = {
        who: {
            field: round(statistics.fmean(getattr(one, field) for one in several), 4)
            for field in Outcome.__struct_fields__
        }
        for who, several in outcomes.items()
    }
    ours = means["ours"]
    ratios = {
        who: {
            "replica_hours": _ratio(ours["replica_hours"], theirs["replica_hours"]),
            "turns": _ratio(ours["turns"], theirs["turns"]),
            "late": _ratio(1 - ours["in_time"], 1 - theirs["in_time"]),
        }
        for who, theirs in means.items()
        if not who.startswith("ours")
    }
    return {"scalers": means, "ratios": ratios}


def _ratio(ours: float, theirs: float) -> float | None:
    return round(ours / theirs, 3) if theirs else None


def _print_table(report: dict[str, dict[str, Any]]) -> None:
    print("| trace | scaler | in time | after 10 min | over | turns | changes | most | hours |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, summary in report.items():
        for who, one in summary["scalers"].items():
            print(
                f"| {name} | {who} | {one['in_time']:.1%} | {one['in_time_settled']:.1%}"
                f" | {one['over']:+.0%} | {one['turns']:.1f} | {one['changes']:.1f}"
                f" | {one['most']:.1f} | {one['replica_hours']:.2f} |"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--traces", type=Path, help="a directory with public traces")
    parser.add_argument("--table", action="store_true", help="Markdown instead of JSON")
    return parser


if __name__ == "__main__":
    main()
