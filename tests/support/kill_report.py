"""What a run of kills has done and hit, as a table."""

from collections import Counter, defaultdict

import msgspec

from tests.support.kill_stack import CONTROL_PLANE
from tests.support.kill_steps import STARTING, STEPS


class Tally(msgspec.Struct):
    """Counted as the run goes on."""

    kills: Counter[str] = msgspec.field(default_factory=Counter)  # by victim
    moments: Counter[str] = msgspec.field(default_factory=Counter)  # by what was waited for
    steps: dict[str, Counter[str]] = msgspec.field(default_factory=lambda: defaultdict(Counter))
    requests: Counter[str] = msgspec.field(default_factory=Counter)  # that stood at each step
    causes: Counter[str] = msgspec.field(default_factory=Counter)
    observed: int = 0  # times the whole ledger was audited
    rests: int = 0
    rows: int = 0
    retried: int = 0
    fenced: int = 0  # workers taken for an older life of themselves
    answers: int = 0
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """Kills of a gateway, a worker or Postgres: the control plane's come on top."""
        return sum(count for victim, count in self.kills.items() if victim != CONTROL_PLANE)

    def note(self, victim: str, steps: Counter[str]) -> None:
        """A kill, and how many requests it found at each step."""
        self.kills[victim] += 1
        self.steps[victim].update(steps.keys())
        self.requests.update(steps)


def report(tally: Tally) -> str:
    """For each step, how many kills of each kind found a request there, and how many requests."""
    victims = sorted(tally.kills)
    lines = [
        f"{tally.count} kills of gateways, workers and Postgres in {tally.seconds:.0f} s",
        f"{tally.observed} audits of the ledger between them",
        f"{tally.rests} rests, each with every request compared with its witnesses",
        f"{tally.rows} requests, {tally.retried} of them with more than one attempt",
        f"{tally.fenced} workers were fenced by an older life, and started again",
        f"{tally.answers} whole answers, each compared with its bill",
        f"end causes: {_listed(tally.causes)}",
        f"killed at a moment of some request: {_listed(tally.moments)}",
        "",
        f"{'step':20}{''.join(f'{victim:>15}' for victim in victims)}{'requests':>12}",
        f"{'(kills)':20}{''.join(f'{tally.kills[victim]:>15}' for victim in victims)}",
    ]
    for step in (*STEPS, STARTING):
        hit = "".join(f"{tally.steps[victim][step]:>15}" for victim in victims)
        lines.append(f"{step:20}{hit}{tally.requests[step]:>12}")
    return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
