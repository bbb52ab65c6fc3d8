"""`python -m simulator`: run one seed and print what it did as JSON, or why it failed."""

import argparse
import sys
import time

import msgspec

from simulator.config import WorldConfig
from simulator.faults import ALL_FAULTS, Fault
from simulator.report import SimulationError, Timing
from simulator.world import World


def main() -> int:
    """Exit status 1 when an invariant broke; the first seed that does ends it."""
    given = _parser().parse_args()
    for seed in range(given.seed, given.seed + given.count):
        config = WorldConfig(
            seed=seed,
            faults=given.faults,
            orders=given.orders,
            gateways=given.gateways,
            workers=given.workers,
            events_max=given.events,
        )
        try:
            summary = _run(config)
        except SimulationError as error:
            print(error, file=sys.stderr)
            return 1
        encoded = msgspec.json.encode(summary)
        print((msgspec.json.format(encoded) if given.count == 1 else encoded).decode())
    return 0


def _run(config: WorldConfig) -> dict[str, object]:
    started_s = time.monotonic()
    report = World(config).run()
    real_s = time.monotonic() - started_s
    timing = Timing(real_s=round(real_s, 3), events_per_s=int(report.events / real_s))
    return {**msgspec.to_builtins(report), **msgspec.to_builtins(timing)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1, help="seeds to run, one line for each")
    parser.add_argument("--orders", type=int, default=80, help="requests to send")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--events", type=int, default=0, help="stop after so many; 0 is at rest")
    parser.add_argument(
        "--faults", type=_faults, default=(), help=f"all, or some of {','.join(ALL_FAULTS)}"
    )
    return parser


def _faults(text: str) -> tuple[Fault, ...]:
    return ALL_FAULTS if text == "all" else tuple(Fault(name) for name in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
