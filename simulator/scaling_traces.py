"""Requests over time in the shapes that autoscalers fail on, drawn from a seed.

Small twins of public traces: conversations of some hundred tokens that come as Poisson does,
code completions with long prompts and tiny answers that come in bursts, a day compressed.
"""

import math
from collections.abc import Callable
from random import Random

import msgspec

Rate = Callable[[float], float]  # seconds since the start: requests a second


class Asked(msgspec.Struct, frozen=True):
    """One request."""

    at_ms: int
    input_tokens: int
    output_tokens: int


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Medians and spreads (of the logarithm) of a lognormal, cut at `most`."""

    input_median: int
    input_spread: float
    output_median: int
    output_spread: float
    most: int = 8_000


SILENT_FROM_S = 200  # in `idle_then`
CONVERSATION = Sizes(input_median=900, input_spread=0.6, output_median=150, output_spread=0.8)
CODE = Sizes(input_median=1_500, input_spread=0.8, output_median=16, output_spread=0.9)

Trace = tuple[Asked, ...]


def flat(seed: int, *, seconds: int = 1_800, per_s: float = 4.0) -> Trace:
    """The same all the time."""
    return poisson(seed, seconds, lambda _: per_s, per_s, CONVERSATION)


def doubling(seed: int, *, seconds: int = 1_800, per_s: float = 4.0) -> Trace:
    """Twice as much within a minute, for good."""
    half = seconds / 2

    def rate(at_s: float) -> float:
        return per_s * (1 + min(1.0, max(0.0, (at_s - half) / 60)))

    return poisson(seed, seconds, rate, 2 * per_s, CONVERSATION)


def diurnal(seed: int, *, days: int = 2, day_s: int = 7_200, most: float = 6.0) -> Trace:
    """Days of two hours: quiet at night, six times as much at noon."""

    def rate(at_s: float) -> float:
        return most * (1 + 5 * (0.5 - 0.5 * math.cos(2 * math.pi * at_s / day_s))) / 6

    return poisson(seed, days * day_s, rate, most, CONVERSATION)


def on_off(seed: int, *, seconds: int = 2_400, most: float = 6.0, every_s: int = 90) -> Trace:
    """A minute and a half of work, as long of hardly any: what thresholds flap on."""

    def rate(at_s: float) -> float:
        return most if int(at_s / every_s) % 2 == 0 else most / 12

    return poisson(seed, seconds, rate, most, CONVERSATION)


def bursts(seed: int, *, seconds: int = 1_800, per_s: float = 1.5, burst: int = 60) -> Trace:
    """Completions now and then, and at random moments a minute apart dozens within a second."""
    dice = Random(seed)  # noqa: S311 - a trace must be drawn again from its seed; nothing is kept secret by it
    asked = list(poisson(seed, seconds, lambda _: per_s, per_s, CODE))
    at_s = dice.expovariate(1 / 60)
    while at_s < seconds:
        asked += [
            Asked(int(1_000 * (at_s + dice.random())), *draw(dice, CODE))
            for _ in range(dice.randrange(burst // 2, burst))
        ]
        at_s += dice.expovariate(1 / 60)
    return tuple(sorted(asked, key=lambda one: one.at_ms))


def idle_then(seed: int, *, silent_s: int = 1_200, seconds: int = 1_800) -> Trace:
    """Some work, a long silence, then work again: for deployments that may go to zero."""

    def rate(at_s: float) -> float:
        return 2.0 if at_s < SILENT_FROM_S or at_s > SILENT_FROM_S + silent_s else 0.0

    return poisson(seed, seconds, rate, 2.0, CONVERSATION)


SHAPES: dict[str, Callable[[int], Trace]] = {
    "flat": flat,
    "doubling": doubling,
    "diurnal": diurnal,
    "bursts": bursts,
    "on_off": on_off,
    "idle_then": idle_then,
}


def poisson(seed: int, seconds: float, rate: Rate, most: float, sizes: Sizes) -> Trace:
    """Arrivals at a changing rate, by thinning those of the highest."""
    dice = Random(seed)  # noqa: S311 - a trace must be drawn again from its seed; nothing is kept secret by it
    asked: list[Asked] = []
    at_s = dice.expovariate(most)
    while at_s < seconds:
        if dice.random() * most < rate(at_s):
            asked.append(Asked(int(at_s * 1_000), *draw(dice, sizes)))
        at_s += dice.expovariate(most)
    return tuple(asked)


def draw(dice: Random, sizes: Sizes) -> tuple[int, int]:
    """Prompt and answer tokens of one request."""
    prompt = dice.lognormvariate(math.log(sizes.input_median), sizes.input_spread)
    answer = dice.lognormvariate(math.log(sizes.output_median), sizes.output_spread)
    return max(1, min(sizes.most, int(prompt))), max(1, min(sizes.most, int(answer)))
