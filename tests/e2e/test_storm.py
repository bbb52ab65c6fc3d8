"""Two hundred requests, a third of them abandoned at random moments: every one accounted for."""

import asyncio
import random
import time

import pytest

from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.client import ask
from tests.support.openai_grammar import check_openai_chat_stream, check_openai_completion_stream
from tests.support.stack import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.model]

REQUESTS = 200
CONCURRENCY = 32
END_CAUSES = {"complete", "length", "client_cancelled"}

SYSTEM = "You are a careful assistant. Answer in one or two short sentences. " * 6


def a_request(rng, number):
    """A path, a body and how to read it: every endpoint, streamed and not."""
    tokens = rng.choice([1, 4, 12, 32])
    stream = rng.random() < 0.7
    words = " ".join(
        rng.choice(["river", "stone", "cloud", "seven", "¿qué?", "한국"])
        for _ in range(rng.randint(1, 120))
    )
    kind = rng.choice(["chat", "chat", "messages", "completion"])
    ask_for = f"{number}: {words}"
    if kind == "completion":
        body = {"model": MODEL, "prompt": ask_for, "max_tokens": tokens, "stream": stream}
        return "/v1/completions", body
    messages = [{"role": "user", "content": ask_for}]
    if kind == "messages":
        body = {"model": MODEL, "system": SYSTEM, "messages": messages, "max_tokens": tokens}
        return "/v1/messages", {**body, "stream": stream}
    messages = [{"role": "system", "content": SYSTEM}, *messages]
    body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": stream}
    if stream and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    return "/v1/chat/completions", body


def a_moment(rng):
    """When to leave: while queued, in prefill, mid-stream, or just after the last byte."""
    return rng.choice([0.0, 0.02, 0.2, rng.uniform(0.0, 6.0)]) if rng.random() < 1 / 3 else None


def check_stream(path, body, raw):
    if path == "/v1/messages":
        return check_anthropic_stream(raw)
    if path == "/v1/completions":
        return check_openai_completion_stream(raw, include_usage=False, n=1)
    wants_usage = "stream_options" in body
    return check_openai_chat_stream(raw, include_usage=wants_usage, n=1)


async def storm(stack, seed):
    rng = random.Random(seed)
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(number):
        path, body = a_request(rng, number)
        leave = a_moment(rng)
        async with gate:
            reply = await ask(
                stack.gateway_url,
                path,
                stack.key,
                body,
                leave_after_s=leave,
                anthropic=path == "/v1/messages",
            )
        return path, body, reply

    return await asyncio.gather(*(one(number) for number in range(REQUESTS)))


@pytest.fixture(scope="session")
def after_storm(stack):
    stack.settles()
    before = {row["request_id"] for row in stack.usage()}
    replies = asyncio.run(storm(stack, seed=20_261_129))
    stack.settles()
    return replies, settled_rows(stack, before)


def settled_rows(stack, before, within_s=15.0):
    """Rows once the gateways' own words are in.

    On a machine this busy a gateway may be silent for a whole lease; the sweeper's word is
    then provisional, and yields to the gateway's.
    """
    deadline = time.monotonic() + within_s
    while True:
        rows = [row for row in stack.usage() if row["request_id"] not in before]
        if all(row["settled_by"] == "gateway" for row in rows) or time.monotonic() > deadline:
            return rows
        time.sleep(0.5)


def test_nobody_who_stayed_was_cut_or_refused(after_storm):
    replies, _ = after_storm
    stayed = [reply for _, _, reply in replies if not reply.left]
    assert [r.status for r in stayed if r.status != 200] == []
    assert not any(reply.cut for reply in stayed)
    assert REQUESTS * 0.5 < len(stayed) < REQUESTS


def test_every_finished_stream_obeys_its_grammar(after_storm):
    replies, _ = after_storm
    for path, body, reply in replies:
        if body.get("stream") and not reply.left:
            assert check_stream(path, body, reply.body).error is None


def test_each_request_has_one_end_cause(after_storm):
    replies, rows = after_storm
    assert len({row["request_id"] for row in rows}) == len(rows)
    assert {row["state"] for row in rows} == {"settled"}
    assert {row["cause"] for row in rows} <= END_CAUSES | {"not_started"}
    finished = {r.headers["x-request-id"] for _, _, r in replies if not r.left}
    odd = [r for r in rows if r["request_id"] in finished and r["cause"] not in END_CAUSES]
    assert odd == []
    assert finished <= {row["request_id"] for row in rows}


def test_metered_is_what_the_journals_say(after_storm, stack):
    _, rows = after_storm
    journalled = stack.journalled()
    for row in rows:
        metered = row["metered_output_tokens"]
        assert metered == journalled.get(row["request_id"], 0), row
        assert row["delivered_tokens"] <= metered, row


def test_the_system_is_clean_afterwards(after_storm, stack):
    report = stack.check()
    assert report["ok"], report
