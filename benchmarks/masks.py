"""What grammars cost a decode step: filling the masks, and the step beside one without them.

`python -m benchmarks.masks DIRECTORY` of a model version. For 1, 8 and 32 rows, a step with
grammars follows one without, so that a busy machine slows both; the ratio is of medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from core.protocol import Grammar, Sampling
from text.grammar import Grammars
from text.rules import TextRules
from worker.grammar import CompiledGrammars, GrammarMasks
from worker.runner import ModelRunner, load_runner
from worker.sampler import Sampler
from worker.sampler_masks import Fill
from worker.step import Draw, Opening, Row, StepPlan

ROWS = (1, 8, 32)
BLOCK_TOKENS = 16
PROMPT = tuple(range(100, 148))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "notes": {"type": "array", "items": {"type": "string"}, "minItems": 40},
    },
    "required": ["name", "tags", "notes"],
    "additionalProperties": False,
}


class TimedMasks(GrammarMasks):
    """As they are, and how long each fill took, in seconds."""

    def __init__(self, grammars: CompiledGrammars) -> None:
        super().__init__(grammars)
        self.fills_s: list[float] = []

    def fill(self, slots: Sequence[int]) -> Fill | None:
        started = time.perf_counter()
        filled = super().fill(slots)
        if filled is not None:
            self.fills_s.append(time.perf_counter() - started)
        return filled


class Answers:
    """`count` sequences of their own slots and blocks, one token a step."""

    def __init__(self, runner: ModelRunner, count: int, first: int, grammar: Grammar | None):
        self._runner = runner
        self._first, self._count = first, count
        self._sampling = Sampling(seed=1, max_tokens=10_000, grammar=grammar)
        self._tokens = [list(PROMPT) for _ in range(count)]
        self._blocks_each = runner.kv_blocks // (2 * max(ROWS))

    def step(self, number: int) -> float:
        """Seconds of one."""
        rows = tuple(self._row(place, number) for place in range(self._count))
        started = time.perf_counter()
        result = self._runner.execute(StepPlan(rows=rows))
        elapsed = time.perf_counter() - started
        for tokens, sampled in zip(self._tokens, result.sampled, strict=True):
            assert not sampled.fault, sampled.fault
            tokens.append(sampled.token_id)
        return elapsed

    def _row(self, place: int, number: int) -> Row:
        tokens, slot = self._tokens[place], self._first + place
        opening = Opening(choice=place, sampling=self._sampling, prompt_ids=PROMPT, output_ids=())
        start = len(tokens) - 1 if number else 0
        used = -(-len(tokens) // BLOCK_TOKENS)
        return Row(
            sequence=slot,
            token_ids=tuple(tokens[start:]),
            start=start,
            blocks=tuple(range(slot * self._blocks_each, slot * self._blocks_each + used)),
            draw=Draw(slot=slot, index=number, opening=None if number else opening),
        )


def measure(directory: Path, rows: int, steps: int) -> dict[str, float]:
    text = TextRules.load(directory)
    grammars = CompiledGrammars(Grammars(text))
    masks = TimedMasks(grammars)
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    started = time.perf_counter()
    grammars.get(grammar)
    compile_s = time.perf_counter() - started
    sampler = Sampler(2 * max(ROWS), vocab_size=text.vocab_size, eos_ids=text.eos_ids, masks=masks)
    blocks = 2 * max(ROWS) * -(-(len(PROMPT) + steps + 1) // BLOCK_TOKENS)
    runner = load_runner(
        directory, block_tokens=BLOCK_TOKENS, kv_blocks=blocks, dtype="auto", sampler=sampler
    )
    free = Answers(runner, rows, 0, None)
    held = Answers(runner, rows, max(ROWS), grammar)
    times = [(free.step(number), held.step(number)) for number in range(steps)][1:]
    fills_us = sorted(1e6 * fill for fill in masks.fills_s[1:])
    free_ms = 1e3 * statistics.median(one for one, _ in times)
    held_ms = 1e3 * statistics.median(other for _, other in times)
    return {
        "rows": rows,
        "compile_with_tables_ms": round(1e3 * compile_s, 1),
        "fill_median_us": round(statistics.median(fills_us), 1),
        "fill_p95_us": round(fills_us[int(0.95 * len(fills_us))], 1),
        "step_ms": round(free_ms, 2),
        "step_with_grammars_ms": round(held_ms, 2),
        "ratio": round(held_ms / free_ms, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(json.dumps([measure(asked.directory, rows, asked.steps) for rows in ROWS], indent=2))


if __name__ == "__main__":
    main()
