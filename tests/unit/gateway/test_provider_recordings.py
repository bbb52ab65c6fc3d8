"""Recordings of real servers, replayed byte for byte through a whole generation."""

import random

import msgspec
import pytest

from core.errors import Code
from core.money import EndCause
from core.protocol import Usage
from gateway.accumulator import Accumulator
from gateway.anthropic.request import parse_messages
from gateway.conversation import (
    Answer,
    CallDelta,
    CallStart,
    ChoiceEnd,
    Conversation,
    Delta,
    Opened,
)
from gateway.openai.chat_request import parse_chat
from tests.support.provider_world import (
    Heard,
    ProviderWorld,
    a_provider,
    plays,
    recording,
    recordings,
    run,
)

pytestmark = pytest.mark.anyio

REFUSED = {"too-long", "too-long-stream", "bad-value", "unknown-model"}
ALL = [*recordings("openai"), *recordings("anthropic")]


def conversation_of(name: str) -> Conversation:
    """What a caller asked that led to this request: extensions and odd values left out."""
    request = dict(recording(name).request)
    if name.startswith("anthropic"):
        return parse_messages(msgspec.json.encode({**request, "max_tokens": 400}))
    return parse_chat(msgspec.json.encode({**request, "temperature": 0.0}))


async def replay(name: str, seed: int) -> Heard:
    recorded = recording(name)
    world = ProviderWorld(plays(recorded, random.Random(seed)))
    provider = a_provider(name.partition("-")[0], extensions=True)
    return await run(world.generation(conversation_of(name), provider))


def gathered(heard: Heard, conversation: Conversation) -> Answer:
    """The whole answer; asserts the grammar of events."""
    accumulator = Accumulator(conversation)
    first, *rest = heard.events
    assert isinstance(first, Opened)
    accumulator.open(first)
    for event in rest:
        match event:
            case Delta():
                accumulator.delta(event)
            case CallStart():
                accumulator.call(event)
            case CallDelta():
                accumulator.arguments(event)
            case ChoiceEnd():
                accumulator.end(event)
            case _:
                raise AssertionError(event)
    return accumulator.answer(heard.generation.usage)


def test_every_recording_names_the_server_and_its_version() -> None:
    assert len(ALL) > 40
    assert {recording(name).server for name in ALL} == {"vLLM 0.32.0"}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_recording_ends_as_it_did_in_whatever_pieces_it_comes(name: str, seed: int) -> None:
    heard = await replay(name, seed)
    recorded = recording(name)
    if recorded.status != 200:
        assert not heard.events
        assert not heard.generation.begun
        assert heard.outcome.cause is EndCause.NOT_STARTED
        assert heard.generation.totals == []
    elif recorded.cut:
        assert heard.outcome.cause is EndCause.FAILED
        assert heard.text
        assert not any(isinstance(event, ChoiceEnd) for event in heard.events)
        assert heard.replica == "provider:acme:estimated"
    else:
        answer = gathered(heard, conversation_of(name))
        assert heard.outcome.whole
        assert all(choice.text or choice.calls for choice in answer.choices)
        assert answer.usage.is_possible
        assert heard.generation.untold_tokens + heard.tokens >= answer.usage.output_tokens


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_a_streamed_answer_is_the_whole_one(dialect: str) -> None:
    for name in recordings(dialect):
        if not name.endswith("-whole") or recording(name).status != 200 or "two" in name:
            continue  # two draws at random are never alike
        streamed = name.removesuffix("-whole") + "-stream"
        conversation = conversation_of(name)
        whole = gathered(await replay(name, 1), conversation)
        stream = gathered(await replay(streamed, 1), conversation)
        assert stream.choices == whole.choices, name
        assert stream.usage.output_tokens == whole.usage.output_tokens


async def test_usage_is_the_providers_where_it_tells_and_says_so() -> None:
    heard = await replay("openai-plain-stream", 3)
    assert heard.generation.usage == Usage(prompt_tokens=34, output_tokens=40)
    assert heard.replica == "provider:acme:told"
    bare = await replay("openai-bare-stream", 3)  # a server that does not tell it
    assert bare.replica == "provider:acme:estimated"
    assert bare.generation.usage.output_tokens > 0
    assert bare.generation.usage.prompt_tokens > 0


async def test_what_a_stop_string_was_is_passed_on() -> None:
    for name in ("openai-stop-stream", "anthropic-stop-whole"):
        assert (await replay(name, 1)).events[-1] == ChoiceEnd(choice=0, finish="stop", stop=",")


async def test_log_probabilities_keep_their_bytes_and_count_the_tokens() -> None:
    heard = await replay("openai-logprobs-stream", 1)
    chances = [chance for event in heard.events for chance in getattr(event, "chances", ())]
    assert b"".join(chance.token for chance in chances).decode() == heard.text
    assert all(len(chance.top) == 2 for chance in chances)
    assert len(chances) == heard.generation.usage.output_tokens == heard.tokens


async def test_a_forced_call_that_ends_with_stop_is_a_call() -> None:
    # vLLM says `stop` of a call forced by name.
    heard = await replay("openai-forced-whole", 1)
    assert heard.events[-1] == ChoiceEnd(choice=0, finish="tool_calls")
    assert heard.arguments == '"Paris"'


async def test_a_prompt_too_long_for_them_is_the_callers_in_our_words() -> None:
    for name in ("openai-too-long", "openai-too-long-stream", "anthropic-too-long"):
        heard = await replay(name, 1)
        assert heard.refusal.code is Code.CONTEXT_LENGTH
        assert heard.generation.fault is not None
        assert heard.generation.fault.kind == "context_window"


async def test_a_model_unknown_to_them_is_our_fault_and_not_the_callers() -> None:
    for name in ("openai-unknown-model", "anthropic-unknown-model"):
        heard = await replay(name, 1)
        assert heard.refusal.code is Code.UNAVAILABLE
        assert "no-such-model" not in heard.refusal.message
        assert heard.generation.fault is not None
        assert heard.generation.fault.ours


async def test_a_fault_of_theirs_told_as_400_is_not_the_callers() -> None:
    # vLLM 0.32.0 answers so when a forced call's arguments are no object.
    for name in ("anthropic-forced-whole", "anthropic-any-whole"):
        heard = await replay(name, 1)
        assert heard.refusal.code is Code.UNAVAILABLE
        assert heard.generation.fault is not None
        assert heard.generation.fault.kind == "error"


async def test_a_stream_whose_server_was_killed_is_an_error_and_never_an_end() -> None:
    # Portkey-AI/gateway#1797: a stream that the provider cut ended cleanly, as if whole.
    for name in ("openai-cut", "anthropic-cut"):
        heard = await replay(name, 1)
        assert heard.refusal.code is Code.INTERNAL
        assert "cut off" in heard.refusal.message
