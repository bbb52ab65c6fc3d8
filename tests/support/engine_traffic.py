"""Random requests for a soak of the engine: fair ones of every kind, and odd ones.

Drawn from a seed. Prompts share beginnings, so that prefixes hit, and some are as long as the
pool allows, so that sequences are preempted.
"""

import random
import time
from collections.abc import Callable
from typing import Any

from core.protocol import CacheMark, Choice, Generate, Grammar, Sampling

GRAMMARS = (
    Grammar(kind="json_object"),
    Grammar(kind="regex", text=r"[a-z]{3,20}( [a-z]{3,20}){0,5}"),
    Grammar(kind="choice", text='["yes", "no", "perhaps not today"]'),
    Grammar(
        kind="json_schema",
        text='{"type":"object","properties":{"name":{"type":"string","maxLength":12},'
        '"age":{"type":"integer"}},"required":["name","age"],"additionalProperties":false}',
    ),
)
NO_GRAMMARS = (
    Grammar(kind="regex", text="(((("),
    Grammar(kind="json_schema", text='{"type": "no such type"}'),
    Grammar(kind="choice", text="[]"),
    Grammar(kind="lark", text="start: nothing"),
)


PENALTIES = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "min_p": 0.05,
    "bad_words": ((10,), (11, 12)),
    "min_tokens": 1,
}
MARKS = (CacheMark(tokens=32, ttl="5m"), CacheMark(tokens=64, ttl="1h"))


class Traffic:
    """`pool_tokens` is what the KV pool holds; `vocab_size` and `version` are the model's."""

    def __init__(self, seed: int, *, version: str, vocab_size: int, pool_tokens: int) -> None:
        self.dice = random.Random(seed)
        self._version = version
        self._vocab_size = vocab_size
        self._pool_tokens = pool_tokens
        self._beginnings = [self._ids(size) for size in (16, 40, 64, 100, 200)]
        self._number = 0
        self._kinds: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
            ("plain", dict),
            ("long", self._long),
            ("several", self._several),
            ("deadline", self._soon_over),
            ("stop", lambda: {"sampling": self._sampling(stop=("e", "th", ". "), stop_ids=(30,))}),
            ("penalties", lambda: {"sampling": self._sampling(**PENALTIES)}),
            (
                "grammar",
                lambda: {
                    "sampling": self._sampling(grammar=self.dice.choice(GRAMMARS), max_tokens=40)
                },
            ),
            ("marks", lambda: {"prompt_ids": self._prompt(80), "cache_marks": MARKS}),
            (
                "logprobs",
                lambda: {"sampling": self._sampling(logprobs=5, prompt_logprobs=2)},
            ),
            (
                "resumed",
                lambda: {"choices": (Choice(index=0, output_ids=self._ids(12)),)},
            ),
            (
                "end at once",
                lambda: {"sampling": self._sampling(logit_bias=((2, 100.0),), temperature=0.0)},
            ),
        )
        self._odd: tuple[Callable[[], dict[str, Any]], ...] = (
            lambda: {"prompt_ids": ()},
            lambda: {"prompt_ids": (1, self._vocab_size)},
            lambda: {"prompt_ids": (-1,)},
            lambda: {"prompt_ids": self._ids(self._pool_tokens + 1)},
            lambda: {"prompt_ids": self._ids(20_000)},
            lambda: {"version": "another"},
            lambda: {"choices": ()},
            lambda: {"choices": (Choice(index=0), Choice(index=0))},
            lambda: {"choices": (Choice(index=0, output_ids=(5,), released_chars=999),)},
            lambda: {"sampling": self._sampling(logit_bias=((self._vocab_size, 1.0),))},
            lambda: {"sampling": self._sampling(stop_ids=(self._vocab_size,))},
            lambda: {"sampling": self._sampling(min_tokens=50, max_tokens=5)},
            lambda: {"sampling": self._sampling(temperature=float("nan"))},
            lambda: {"sampling": self._sampling(top_p=0.0)},
            lambda: {"sampling": self._sampling(stop=("",))},
            lambda: {"sampling": self._sampling(grammar=self.dice.choice(NO_GRAMMARS))},
            lambda: {"sampling": self._sampling(allowed_ids=(7,), bad_words=((7,),))},
            lambda: {"sampling": self._sampling(grammar=GRAMMARS[2], min_tokens=8, max_tokens=8)},
        )

    def request(self) -> tuple[str, Generate]:
        """A request, and of which kind it is."""
        self._number += 1
        if self.dice.random() < 0.1:
            return "odd", self._fair(**self.dice.choice(self._odd)())
        kind, changes = self.dice.choice(self._kinds)
        return kind, self._fair(**changes())

    def _long(self) -> dict[str, Any]:
        size = self.dice.randint(self._pool_tokens // 4, self._pool_tokens // 2)
        return {"prompt_ids": self._ids(size), "sampling": self._sampling(max_tokens=80)}

    def _several(self) -> dict[str, Any]:
        return {"choices": tuple(Choice(index=i) for i in range(self.dice.randint(2, 4)))}

    def _soon_over(self) -> dict[str, Any]:
        return {"deadline_ms": time.time_ns() // 1_000_000 + self.dice.randint(-100, 1500)}

    def _fair(self, **changes: Any) -> Generate:
        defaults = {
            "request_id": f"req_{self._number}",
            "attempt": 1,
            "version": self._version,
            "prompt_ids": self._prompt(1),
            "choices": (Choice(index=0),),
            "sampling": self._sampling(),
            "tenant_salt": self.dice.choice((b"a", b"b")),
            "service_class": self.dice.choice(("interactive", "standard", "batch")),
        }
        return Generate(**(defaults | changes))

    def _sampling(self, **changes: Any) -> Sampling:
        defaults = {
            "seed": self.dice.randrange(1 << 62),
            "max_tokens": self.dice.randint(1, 48),
            "temperature": self.dice.choice((0.0, 0.7, 1.0)),
            "top_p": self.dice.choice((1.0, 0.9)),
            "top_k": self.dice.choice((0, 20)),
        }
        return Sampling(**(defaults | changes))

    def _prompt(self, least: int) -> tuple[int, ...]:
        beginning = self.dice.choice(self._beginnings)
        return beginning + self._ids(max(least - len(beginning), self.dice.randint(1, 60)))

    def _ids(self, size: int) -> tuple[int, ...]:
        # Of those that every small model has as text.
        return tuple(self.dice.choices(range(20, self._vocab_size), k=max(1, size)))
