"""`python -m simulator.rollouts`: run every scenario under many seeds and print the table."""

import argparse
import sys

from simulator.rollouts.figures import SCENARIOS, measure, table
from simulator.rollouts.trial import Trial


def main() -> int:
    """`--show` prints how single trials ended instead."""
    given = _parser().parse_args()
    chosen = [s for s in SCENARIOS if given.scenario in {"", s.name}]
    seeds = range(given.seed, given.seed + given.count)
    if given.show:
        for scenario in chosen:
            for seed in seeds:
                end = Trial(scenario, seed).run()
                print(scenario.name, seed, end.state, end.minutes, *end.reasons, sep="\n  ")
    else:
        print(table([measure(scenario, seeds) for scenario in chosen]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator.rollouts", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--count", type=int, default=20, help="seeds of each scenario")
    parser.add_argument("--scenario", default="", help="one of them by name; all if left out")
    parser.add_argument("--show", action="store_true", help="single trials and their reasons")
    return parser


if __name__ == "__main__":
    sys.exit(main())
