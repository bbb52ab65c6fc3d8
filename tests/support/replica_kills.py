"""The real worker killed under real streams: nothing is cut in silence, nothing is told twice.

Each kind of answer is first taken undisturbed. Then a worker is killed while one of each kind
runs, again and again; every answer must be the undisturbed one, or its beginning and an error.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec

from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.client import Reply, ask
from tests.support.openai_grammar import check_openai_chat_stream, check_openai_completion_stream
from tests.support.stack import MODEL, Stack

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
WORKERS = ("worker", "worker-2")
PATIENCE_S = 120.0
TIE = 0.05  # of a logit: two tokens so close may change places with the company they keep

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
        "sights": {
            "type": "array",
            "items": {"type": "string", "maxLength": 16},
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["name", "people", "sights"],
    "additionalProperties": False,
}
SHAPE = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
TOOL = {"type": "function", "function": {"name": "visit", "parameters": CITY}}


class Told(msgspec.Struct):
    """What one stream said, whole or up to its error. `gaps`: between the two likeliest tokens."""

    texts: list[str]
    whole: bool
    gaps: list[list[float]]


class Kind(msgspec.Struct, frozen=True):
    """One kind of answer. `valid` says whether a whole text of it is what it must be."""

    name: str
    path: str
    fields: dict[str, Any]
    valid: Callable[[str], bool] = bool


def _is_city(text: str) -> bool:
    return jsonschema.Draft202012Validator(CITY).is_valid(json.loads(text))


LONG = {"max_tokens": 48, "ignore_eos": True}
SEEN = {"logprobs": True, "top_logprobs": 2}
KINDS = (
    Kind("plain", CHAT, {**LONG, **SEEN}),
    Kind("two choices", CHAT, {**LONG, **SEEN, "n": 2, "max_tokens": 32}),
    Kind("penalties", CHAT, {**LONG, **SEEN, "frequency_penalty": 0.7, "presence_penalty": 0.3}),
    Kind("stop", CHAT, {**LONG, **SEEN, "stop": ["zebra", "\n\n\n\n"]}),
    Kind("schema", CHAT, {"max_tokens": 120, "response_format": SHAPE}, _is_city),
    Kind("tool", CHAT, {"max_tokens": 120, "tools": [TOOL], "tool_choice": "required"}, _is_city),
    Kind("completion", COMPLETIONS, {**LONG, "logprobs": 2}),
    Kind("message", MESSAGES, {"max_tokens": 60}),
)


class Tally(msgspec.Struct):
    """Counted as the run goes on."""

    kills: int = 0
    streams: Counter[str] = msgspec.field(default_factory=Counter)
    whole: Counter[str] = msgspec.field(default_factory=Counter)
    errors: int = 0
    ties: int = 0
    resumed: int = 0

    def report(self) -> str:
        lines = [
            f"{self.kills} kills of the real worker under {self.streams.total()} streams",
            f"{self.whole.total()} whole, {self.errors} ended in an error event, none in silence",
            f"{self.resumed} requests had more than one attempt",
            f"{self.ties} went on otherwise from two tokens less than {TIE} apart",
        ]
        lines += [f"  {kind.name:12} {self.whole[kind.name]:>4} whole" for kind in KINDS]
        return "\n".join(lines)


async def kill_workers(stack: Stack, *, kills: int, seed: int, copies: int = 1) -> Tally:
    """Raises AssertionError at the first answer that is not what it must be."""
    rng, tally = random.Random(seed), Tally()
    known = {row["request_id"] for row in await asyncio.to_thread(stack.usage)}
    replies = await asyncio.gather(*(_ask(stack, kind) for kind in KINDS))
    expected = {kind.name: _read(kind, r) for kind, r in zip(KINDS, replies, strict=True)}
    for kind in KINDS:
        undisturbed = expected[kind.name]
        assert undisturbed.whole, kind.name
        assert all(kind.valid(text) for text in undisturbed.texts), (kind.name, undisturbed)
    for number in range(kills):
        await asyncio.to_thread(stack.wait_ready)
        asking = [
            (kind, asyncio.create_task(_ask(stack, kind))) for kind in KINDS for _ in range(copies)
        ]
        await asyncio.sleep(rng.uniform(0.4, 2.5))
        stack.kill(WORKERS[number % len(WORKERS)])
        tally.kills += 1
        for kind, task in asking:
            _judge(kind, await task, expected[kind.name], tally)
    await asyncio.to_thread(stack.wait_ready)
    await asyncio.to_thread(stack.settles)
    rows = [r for r in await asyncio.to_thread(stack.usage) if r["request_id"] not in known]
    tally.resumed = sum(row["attempts"] > 1 for row in rows)
    return tally


async def _ask(stack: Stack, kind: Kind) -> Reply:
    words = f"Tell me of a city, in some detail. ({kind.name})"
    body = {"model": MODEL, "stream": True, "temperature": 0, **kind.fields}
    if kind.path == COMPLETIONS:
        body["prompt"] = words
    else:
        body["messages"] = [{"role": "user", "content": words}]
    return await ask(
        stack.gateway_url,
        kind.path,
        stack.key,
        body,
        leave_after_s=PATIENCE_S,
        anthropic=kind.path == MESSAGES,
    )


def _judge(kind: Kind, reply: Reply, expected: Told, tally: Tally) -> None:
    tally.streams[kind.name] += 1
    assert not reply.left, f"{kind.name}: nothing for {PATIENCE_S} s"
    assert not reply.cut, f"{kind.name}: cut in silence after {reply.body[-300:]!r}"
    if reply.status != 200:  # it had not begun
        assert reply.status in (503, 529), reply
        tally.errors += 1
        return
    told = _read(kind, reply)
    for choice, text in enumerate(told.texts):
        wanted = expected.texts[choice]
        if text != wanted if told.whole else not wanted.startswith(text):
            _assert_tie(kind, told, expected, choice)
            tally.ties += 1
        if told.whole:
            assert kind.valid(text), (kind.name, text)
    tally.whole[kind.name] += told.whole
    tally.errors += not told.whole


def _assert_tie(kind: Kind, told: Told, expected: Told, choice: int) -> None:
    """Where two answers part, they part at two tokens of which either might have been likelier."""
    texts = (told.texts[choice], expected.texts[choice])
    if not expected.gaps[choice]:  # a grammar's choice is not among the likeliest, nor is a call's
        assert kind.name in {"schema", "tool", "message"}, texts
        assert kind.name != "message", texts
        return
    pairs = zip(told.gaps[choice], expected.gaps[choice], strict=False)
    assert any(min(pair) < TIE for pair in pairs), (kind.name, *texts)


def _read(kind: Kind, reply: Reply) -> Told:
    """By the dialect's grammar, which takes no token twice after a finish, nor a silent end."""
    assert reply.status == 200, reply
    n = kind.fields.get("n", 1)
    if kind.path == MESSAGES:
        message = check_anthropic_stream(reply.body)
        assert message.done != (message.error is not None)
        return Told([message.text], message.done, [[]])
    check = check_openai_chat_stream if kind.path == CHAT else check_openai_completion_stream
    said = check(reply.body, include_usage=False, n=n)
    assert said.done != (said.error is not None)
    texts = said.texts
    if "tools" in kind.fields:
        texts = ["".join(call["arguments"] for call in calls) for calls in said.calls]
    return Told(texts, said.done, [_gaps(chances) for chances in said.logprobs])


def _gaps(chances: list[dict[str, Any]]) -> list[float]:
    found = []
    for chance in chances:
        top = chance.get("top_logprobs") or []
        likely = list(top.values()) if isinstance(top, dict) else [one["logprob"] for one in top]
        if len(likely) > 1:
            found.append(abs(likely[0] - likely[1]))
    return found
