"""What a safety policy costs a stream: how far it holds text back, and microseconds a delta.

    python -m benchmarks.safety [--deltas 4000]

Each policy reads the same prose, four characters a delta, as `gateway.safety.output` is fed by
the relay; `bare` is the same loop without a screen. Medians of five runs of CPU time, after one
that makes the automata's states. `behind_max` is the furthest, in characters, that a stream was
behind.
"""

import argparse
import json
import statistics
import time

from core.safety.policy import PII, Action, Classifier, Detector, Pattern, Policy, Rule, Terms
from core.safety.rulebook import Rulebook
from gateway.conversation import Delta
from gateway.safety.classifier import classify
from gateway.safety.output import OutputScreen

PROSE = (
    "The quick brown fox jumps over the lazy dog, and in 1997 or so it wrote to nobody at all. "
    "Call it a fable: there are 12 of them, and none is longer than a page. "
)
DELTA_CHARS = 4
RUNS = 5
WORDS = tuple(f"forbidden{n} word" for n in range(5_000))

ACTIONS: tuple[Action, ...] = ("mask", "log")
POLICIES: dict[str, tuple[Detector, ...]] = {
    "10 terms": (Terms(terms=WORDS[:10]),),
    "5,000 terms": (Terms(terms=WORDS),),
    "whole words": (Terms(terms=("cat", "dog", "fox"), whole_word=True),),
    "a pattern": (Pattern(pattern=r"\b[A-Z]{2}\d{4,8}\b"),),
    "PII, all kinds": (PII(),),
    "terms, pattern, PII": (Terms(terms=WORDS[:100]), Pattern(pattern=r"\d{3}-\d{5}"), PII()),
    "classifier": (Classifier(),),
}


def a_book(detectors: tuple[Detector, ...], action: Action) -> Rulebook:
    rules = [
        Rule(name=f"r{n}", stages=("output",), detector=detector, action=action)
        for n, detector in enumerate(detectors)
    ]
    return Rulebook(Policy(rules=tuple(rules)), classify)


def measured(book: Rulebook | None, deltas: list[Delta]) -> tuple[float, int]:
    """Microseconds for each delta, and the furthest behind."""
    given = told = behind = 0
    screen = None
    if book is not None:
        screen = OutputScreen(book, choices=1, is_json=False, tell=lambda *_: None)
    began = time.process_time()
    for delta in deltas:
        given += len(delta.text)
        events = [delta] if screen is None else screen.take(delta)
        told += sum(len(event.text) for event in events if isinstance(event, Delta))
        behind = max(behind, given - told)
    return (time.process_time() - began) / len(deltas) * 1e6, behind


def measure(
    name: str, detectors: tuple[Detector, ...], action: Action, deltas: list[Delta], bare: float
) -> dict[str, object]:
    began = time.perf_counter()
    book = a_book(detectors, action)
    made_ms = (time.perf_counter() - began) * 1e3
    measured(book, deltas)
    runs = [measured(book, deltas) for _ in range(RUNS)]
    micros = statistics.median(run[0] for run in runs)
    return {
        "policy": name,
        "action": action,
        "hold_chars": book.hold_chars,
        "behind_max": max(run[1] for run in runs),
        "added_us_per_delta": round(micros - bare, 2),
        "ready_in_ms": round(made_ms, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deltas", type=int, default=4_000)
    count = parser.parse_args().deltas
    text = (PROSE * (count * DELTA_CHARS // len(PROSE) + 1))[: count * DELTA_CHARS]
    deltas = [
        Delta(choice=0, text=text[at : at + DELTA_CHARS]) for at in range(0, len(text), DELTA_CHARS)
    ]
    bare = statistics.median(measured(None, deltas)[0] for _ in range(RUNS))
    policies = [
        measure(name, detectors, action, deltas, bare)
        for name, detectors in POLICIES.items()
        for action in ACTIONS
    ]
    told = {"bare_us_per_delta": round(bare, 2), "delta_chars": DELTA_CHARS, "policies": policies}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
