"""Load on an engine, closed or open, and what its clients saw of it."""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence

from benchmarks.engine_peers import Answer, Peer

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
ID_MIN, ID_MAX = 300, 40_000  # of the ids prompts are made of: no control tokens among them


class Prompts:
    """About nine tenths of each are the same; what follows is at random."""

    def __init__(self, *, shared: int, own: int, seed: int) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - prompts, not secrets
        self._own = own
        self._shared = self.fresh(shared)

    def fresh(self, length: int) -> list[int]:
        """One that shares nothing."""
        return [self._dice.randrange(ID_MIN, ID_MAX) for _ in range(length)]

    def take(self, count: int) -> list[list[int]]:
        """The next ones."""
        return [self._shared + self.fresh(self._own) for _ in range(count)]


async def closed(
    peer: Peer, prompts: Sequence[list[int]], *, clients: int, max_tokens: int
) -> tuple[list[Answer], float]:
    """Each client sends its next prompt when its answer is complete. Answers and seconds."""
    waiting = iter(prompts)
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in waiting:  # one iterator for all clients, so each prompt is asked once
            answers.append(await peer.answer(prompt, max_tokens))  # noqa: PERF401 - shared too

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return answers, time.perf_counter() - begin


async def opened(
    peer: Peer, prompts: Sequence[list[int]], *, rate: float, max_tokens: int
) -> tuple[list[Answer], float]:
    """Arrivals at random, `rate` a second on average (Poisson), whether or not any ended."""
    dice = random.Random(len(prompts))  # noqa: S311 - the same arrivals for each peer
    begin = time.perf_counter()
    asked = []
    for prompt in prompts:
        asked.append(asyncio.create_task(peer.answer(prompt, max_tokens)))
        await asyncio.sleep(dice.expovariate(rate))
    return list(await asyncio.gather(*asked)), time.perf_counter() - begin


def seen(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Figures of one round. TTFT and ITL in ms; ITL is from event to event of one answer."""
    first = [1000 * (answer.times[0] - answer.sent) for answer in answers]
    gaps = [
        1000 * (after - before)
        for answer in answers
        for before, after in itertools.pairwise(answer.times)
    ]
    return {
        "tokens_per_s": sum(answer.output_tokens for answer in answers) / seconds,
        "cached_tokens": statistics.mean(answer.cached_tokens for answer in answers),
        **{f"ttft_{name}_ms": quantile(first, at) for name, at in QUANTILES.items()},
        **{f"itl_{name}_ms": quantile(gaps, at) for name, at in QUANTILES.items()},
    }


def quantile(values: Sequence[float], at: float) -> float:
    """The value that a share `at` of all do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))] if ordered else 0.0
