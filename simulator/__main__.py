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
    """Exit status 1 when an invariant broke."""
    config = _config(sys.argv[1:])
    started_s = time.monotonic()
    try:
        report = World(config).run()
    except SimulationError as error:
        print(error, file=sys.stderr)
        return 1
    real_s = time.monotonic() - started_s
    timing = Timing(real_s=round(real_s, 3), events_per_s=int(report.events / real_s))
    summary = msgspec.to_builtins(report) | msgspec.to_builtins(timing)
    print(msgspec.json.format(msgspec.json.encode(summary)).decode())
    return 0


def _config(arguments: list[str]) -> WorldConfig:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--orders", type=int, default=80, help="requests to send")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--events", type=int, default=0, help="stop after so many")
    parser.add_argument(
        "--faults",
        type=_faults,
        default=(),
        help=f"all, or some of {','.join(ALL_FAULTS)}",
    )
    given = parser.parse_args(arguments)
    return WorldConfig(
        seed=given.seed,
        faults=given.faults,
        orders=given.orders,
        gateways=given.gateways,
        workers=given.workers,
        events_max=given.events,
    )


def _faults(text: str) -> tuple[Fault, ...]:
    return ALL_FAULTS if text == "all" else tuple(Fault(name) for name in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
