"""What was thought: told in every dialect, taken back as it was, gathered and counted."""

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import RefusedError
from core.providers import ProviderView
from gateway.accumulator import Accumulator
from gateway.anthropic import AnthropicStream, message_json, parse_messages
from gateway.conversation import (
    CallDelta,
    CallStart,
    ChoiceEnd,
    Conversation,
    Delta,
    StreamEvent,
    ThoughtDelta,
)
from gateway.openai import OpenAIChatStream, OpenAICompletionStream, chat_json, parse_chat
from gateway.providers.anthropic_answer import AnthropicAnswer
from gateway.providers.estimate import prompt_tokens
from gateway.providers.event_stream import ServerEvent
from gateway.providers.openai_answer import OpenAIAnswer
from gateway.providers.translate import request_body
from gateway.responses import (
    ResponsesStream,
    answer_items,
    continued,
    parse_response,
    response_json,
)
from gateway.thinking import Thought, Thoughts
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.dialect_events import (
    CREATED_MS,
    REQUEST_ID,
    Told,
    a_conversation,
    finished_events,
    gathered,
    thought,
    whole,
    written,
)
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.provider_world import ProviderWorld, a_provider, run
from tests.support.provider_world import says as provider_says
from tests.support.responses_grammar import check_responses_stream
from tests.support.sdk_clients import JSON, MODEL, anthropic_client, openai_client
from tests.unit.gateway.test_provider_requests import body_of
from tests.unit.gateway.test_thinking import ASK, TEXT, USAGE, chat, message, response

# What was thought before.


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def think(text: str = "hm", signature: str = "c2ln") -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


SEALED = {"type": "redacted_thinking", "data": "c2VhbGVk"}


def use(number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "look", "input": {}}


def result(number: int) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "a cat"}


def turns_with(*blocks: Any) -> list[Any]:
    """An answer of these blocks, and what a user says to it."""
    calls = [int(block["id"][6:]) for block in blocks if block["type"] == "tool_use"]
    after = [result(number) for number in calls] or [say("Go on.")]
    return [
        *ASK,
        {"role": "assistant", "content": list(blocks)},
        {"role": "user", "content": after},
    ]


@pytest.mark.parametrize(
    "blocks",
    [
        [think(), say("a")],
        [think(""), SEALED, say("a")],
        [think("x"), say("a"), think("y"), say("b")],
        [think("x"), use(0), think("y"), use(1), SEALED],
        [think("x"), say("a"), think("y"), use(0), use(1), think("z")],
        [say("a"), SEALED, use(0)],
        [think("x"), think("y"), use(0)],
    ],
)
def test_thoughts_go_back_to_anthropic_where_and_as_they_were(blocks: list[Any]) -> None:
    messages = turns_with(*blocks)
    conversation = message(messages=messages)
    body = body_of(conversation, a_provider("anthropic"))
    assert body["messages"][1]["content"] == blocks
    again = parse_messages(json.dumps(body | {"model": "house", "max_tokens": 9_000}).encode())
    assert again.turns == conversation.turns
    plain = body_of(conversation, a_provider())["messages"][1]
    assert set(plain) <= {"role", "content", "tool_calls"}  # the published types have no thoughts


def test_thoughts_go_without_signature_to_servers_that_take_them() -> None:
    conversation = message(messages=turns_with(think("x"), SEALED, say("a"), think("y"), use(0)))
    raw = request_body(conversation, a_provider(extensions=True), model="up", max_tokens=9)
    told = json.loads(raw)["messages"][1]
    assert (told["reasoning_content"], told["reasoning"]) == ("xy", "xy")
    again = parse_chat(raw)
    assert again.turns[1].thoughts == (Thought(text="xy"),)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_chat_s_thoughts_are_nobody_s_to_sign(name: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for more in ({"content": "a"}, {"tool_calls": [call]}):
        messages = [*ASK, {"role": "assistant", name: "hm", **more}]
        messages.append(
            {"role": "tool", "tool_call_id": "c", "content": "x"}
            if "tool_calls" in more
            else ASK[0]
        )
        conversation = chat(messages=messages)
        assert conversation.turns[1].thoughts == (Thought(text="hm"),)
        content = body_of(conversation, a_provider("anthropic"))["messages"][1]["content"]
        assert [block["type"] for block in content] in (["text"], ["tool_use"])
    messages[1][name] = 5
    with pytest.raises(RefusedError):
        chat(messages=messages)


def test_an_answer_of_thoughts_that_nobody_takes_back_is_no_message() -> None:
    conversation = message(messages=turns_with(think("x", "")))
    body = body_of(conversation, a_provider("anthropic"))
    assert [each["role"] for each in body["messages"]] == ["user"]


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "thinking", "signature": "s"}, "thinking"),
        ({"type": "thinking", "thinking": "t"}, "signature"),
        (think() | {"cache_control": {"type": "ephemeral"}}, "cache_control"),
        (think() | {"more": 1}, "more"),
        ({"type": "redacted_thinking"}, "data"),
        (SEALED | {"cache_control": {"type": "ephemeral"}}, "cache_control"),
    ],
)
def test_a_bad_thought_is_refused_by_its_field(block: Any, param: str) -> None:
    with pytest.raises(RefusedError) as caught:
        message(messages=turns_with(block))
    assert caught.value.refusal.param == f"messages.1.content.0.{param}"
    with pytest.raises(RefusedError) as caught:
        message(messages=[{"role": "user", "content": [think()]}])
    assert caught.value.refusal.param == "messages.0.content.0.type"


def test_marks_stay_where_they_were_among_thoughts() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    blocks = [think("x"), say("a") | mark, think("y"), use(0) | mark, use(1)]
    body = body_of(message(messages=turns_with(*blocks)), a_provider("anthropic"))
    assert body["messages"][1]["content"] == blocks


def test_an_estimate_counts_what_was_thought() -> None:
    without = message(messages=turns_with(say("a")))
    with_ = message(messages=turns_with(think("a long time ago"), say("a")))
    assert prompt_tokens(with_) > prompt_tokens(without)


assistants = st.builds(
    lambda said, thinks: {
        "role": "assistant",
        "content": [block for pair in zip(thinks, said, strict=False) for block in pair],
    },
    st.lists(st.text("ab", min_size=1).map(say), min_size=1, max_size=3),
    st.lists(st.text("xy").map(think) | st.just(SEALED), min_size=3, max_size=3),
)


@given(st.lists(assistants, min_size=1, max_size=3))
def test_what_was_thought_survives_any_number_of_tellings(answers: list[Any]) -> None:
    messages = [ASK[0], *(each for answer in answers for each in (answer, ASK[0]))]
    conversation = message(messages=messages)
    body = body_of(conversation, a_provider("anthropic", stream=False))
    assert parse_messages(json.dumps(body).encode()).turns == conversation.turns


# What is thought.


def chat_stream(n: int = 1) -> OpenAIChatStream:
    return OpenAIChatStream(a_conversation(n=n), request_id=REQUEST_ID, created_ms=CREATED_MS)


THEIRS = a_conversation(dialect="anthropic")


@settings(max_examples=30)  # the SDK's own models take long
@given(events=finished_events(n=2, tools=True, thoughts=True), pings=st.booleans())
def test_chats_tell_the_text_of_thoughts(events: list[Told], *, pings: bool) -> None:
    raw = written(chat_stream(2), whole(events, USAGE), pings=pings)
    told = check_openai_chat_stream(raw, include_usage=False, n=2)
    assert told.thoughts == [thought(events, 0), thought(events, 1)]
    body = chat_json(
        gathered(a_conversation(n=2), events, USAGE),
        a_conversation(n=2),
        request_id=REQUEST_ID,
        created_ms=CREATED_MS,
    )
    answer = openai_client(body, JSON).chat.completions.create(model=MODEL, messages=ASK)
    for choice, text in zip(answer.choices, told.thoughts, strict=True):
        assert getattr(choice.message, "reasoning_content", "") == text


@settings(max_examples=30)
@given(events=finished_events(tools=True, thoughts=True), pings=st.booleans())
def test_messages_tell_thoughts_whole_as_streamed(events: list[Told], *, pings: bool) -> None:
    stream = AnthropicStream(THEIRS, request_id=REQUEST_ID)
    raw = written(stream, whole(events, USAGE), pings=pings)
    told = check_anthropic_stream(raw)
    assert "".join(each["thinking"] for each in told.thoughts) == thought(events, 0)
    with anthropic_client(raw).messages.stream(model=MODEL, max_tokens=5, messages=ASK) as opened:
        streamed = opened.get_final_message()
    body = message_json(gathered(THEIRS, events, USAGE), THEIRS, request_id=REQUEST_ID)
    asked_whole = anthropic_client(body, JSON).messages.create(
        model=MODEL, max_tokens=5, messages=ASK
    )
    kinds = [block.type for block in asked_whole.content]
    assert kinds == [block.type for block in streamed.content]
    for one, other in zip(asked_whole.content, streamed.content, strict=True):
        if one.type in {"thinking", "redacted_thinking"}:
            assert one == other


def a_response_stream(conversation: Conversation) -> ResponsesStream:
    stream = ResponsesStream(conversation, request_id=REQUEST_ID, created_ms=CREATED_MS)
    stream.kept, stream.ended_ms = True, CREATED_MS
    return stream


INCLUDE = ["reasoning.encrypted_content"]


@given(events=finished_events(tools=True, thoughts=True), sealed=st.booleans())
def test_responses_tell_summaries_and_seal_what_goes_back(
    events: list[Told], *, sealed: bool
) -> None:
    conversation = response(
        stream=True, reasoning={"summary": "auto"}, **({"include": INCLUDE} if sealed else {})
    )
    told = check_responses_stream(written(a_response_stream(conversation), whole(events, USAGE)))
    answer = gathered(conversation, events, USAGE)
    body = response_json(
        answer,
        conversation,
        request_id=REQUEST_ID,
        created_ms=CREATED_MS,
        ended_ms=CREATED_MS,
        kept=True,
    )
    assert told.response == json.loads(body)
    thoughts = [item for item in told.output if item["type"] == "reasoning"]
    texts = [part["text"] for item in thoughts for part in item["summary"]]
    assert "".join(texts) == thought(events, 0)
    kept = [item for item in answer_items(answer, conversation, REQUEST_ID) if item.id[:3] == "rs_"]
    if sealed:
        body_again = {"model": "m", "input": thoughts, "store": False}
        if thoughts:
            again = parse_response(json.dumps(body_again).encode()).ask
            assert again is not None
            assert list(again.items) == kept
    else:
        assert not any("encrypted_content" in item for item in thoughts)


def test_a_response_that_nobody_asked_a_summary_of_has_none() -> None:
    events: list[Told] = [
        ThoughtDelta(choice=0, text="hm"),
        ThoughtDelta(choice=0, signature="s"),
        Delta(choice=0, text="a"),
        ChoiceEnd(choice=0, finish="stop"),
    ]
    conversation = response(stream=True)
    raw = written(a_response_stream(conversation), whole(events, USAGE))
    assert b"hm" not in raw
    told = json.loads(raw.rsplit(b"data: ", 1)[1])["response"]
    assert [item["type"] for item in told["output"]] == ["reasoning", "message"]
    assert told["output"][0]["summary"] == []
    assert told["reasoning"] == {"effort": None, "summary": None}
    with openai_client(raw).responses.stream(model=MODEL, input="Hi") as stream:
        final = stream.get_final_response()
    assert (
        final.output_text,
        final.usage and final.usage.output_tokens_details.reasoning_tokens,
    ) == (
        "a",
        5,
    )
    # It is kept all the same, and goes back when the response is continued.
    items = answer_items(gathered(conversation, events, USAGE), conversation, REQUEST_ID)
    turns = continued(response(input="And?"), items).turns
    assert turns[0].thoughts == (Thought(text="hm", signature="s"),)
    assert turns[0].content == "a"


@pytest.mark.parametrize(
    ("item", "known"),
    [
        ({"summary": []}, None),
        ({"summary": [{"type": "summary_text", "text": "x"}]}, Thought(text="x")),
        (
            {
                "summary": [{"text": "x"}],
                "content": [{"type": "reasoning_text", "text": "y"}, {"text": "z"}],
            },
            Thought(text="y\nz"),
        ),
        ({"summary": [], "encrypted_content": "gAAAA"}, None),
        ({"summary": [], "encrypted_content": "hw1.!"}, None),
        (
            {"summary": [], "encrypted_content": "hw1." + base64.b64encode(b"\xc1").decode()},
            None,
        ),
        (
            {
                "summary": [],
                "encrypted_content": "hw1."
                + base64.b64encode(msgspec.msgpack.encode(["t", "s", ""])).decode(),
            },
            Thought(text="t", signature="s"),
        ),
    ],
)
def test_an_item_that_comes_back_is_what_is_known_of_it(item: Any, known: Any) -> None:
    told = {"type": "reasoning", "id": "rs_1", **item}
    say_again = {"role": "assistant", "content": "a"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    turns = response(input=[ASK[0], told, say_again, told, call, output]).turns
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]
    expected = () if known is None else (known, msgspec.structs.replace(known, at=1))
    assert turns[1].thoughts == expected
    alone = response(input=[ASK[0], told, ASK[0]]).turns
    assert len(alone) == (2 if known is None else 3)


def test_completions_have_no_thoughts() -> None:
    conversation = a_conversation(kind="text", turns=(), prompt="Once")
    stream = OpenAICompletionStream(conversation, request_id=REQUEST_ID, created_ms=CREATED_MS)
    with pytest.raises(AssertionError):
        stream.write(TEXT)


def test_thoughts_are_gathered_by_their_places_and_signatures() -> None:
    gathering = Thoughts()
    for text, signature, redacted, at in (
        ("", "", "", 0),
        ("a", "", "", 0),
        ("b", "s", "", 0),
        ("c", "", "", 0),
        ("", "", "r", 0),
        ("d", "", "", 1),
        ("e", "", "", 2),
    ):
        gathering.take(text, signature, redacted, at=at, calls=0)
    assert gathering.all == (
        Thought(text="ab", signature="s"),
        Thought(text="c"),
        Thought(redacted="r"),
        Thought(text="d", at=1),
        Thought(text="e", at=2),
    )
    accumulator = Accumulator(a_conversation())
    for event in (TEXT, CallStart(choice=0, call=0, name="f"), TEXT):
        accumulator.take(event)
    accumulator.take(CallDelta(choice=0, call=0, arguments="{}"))
    accumulator.take(ChoiceEnd(choice=0, finish="tool_calls"))
    (choice,) = accumulator.answer(USAGE).choices
    assert choice.thoughts == (Thought(text="hm"), Thought(text="hm", calls=1))


# As providers tell it.


def chunks(*deltas: Any) -> list[StreamEvent]:
    reader = OpenAIAnswer(choices=1, prompt_tokens=5)
    events: list[StreamEvent] = []
    for delta in deltas:
        events += reader.take(ServerEvent("", json.dumps({"choices": [{"delta": delta}]})))
    return events[1:]


def test_openai_s_servers_tell_it_under_either_name_or_both() -> None:
    assert chunks(
        {"reasoning_content": "a", "content": None},
        {"reasoning": "b"},
        {"reasoning": "c", "reasoning_content": "c"},
        {"reasoning": {"not": "text"}, "content": "d"},
    ) == [*(ThoughtDelta(choice=0, text=text) for text in "abc"), Delta(choice=0, text="d")]
    reader = OpenAIAnswer(choices=1, prompt_tokens=5)
    told = {"reasoning_content": "a", "content": "b"}
    body = {"choices": [{"message": told, "finish_reason": "stop"}]}
    assert reader.whole(json.dumps(body).encode())[1:3] == [
        ThoughtDelta(choice=0, text="a"),
        Delta(choice=0, text="b"),
    ]


def test_a_whole_message_tells_its_thoughts() -> None:
    content = [think("a"), SEALED, think("", ""), say("b")]
    body = {"content": content, "stop_reason": "end_turn", "usage": {"output_tokens": 4}}
    events = AnthropicAnswer(prompt_tokens=5).whole(json.dumps(body).encode())
    assert events[1:-1] == [
        ThoughtDelta(choice=0, text="a", signature="c2ln"),
        ThoughtDelta(choice=0, redacted="c2VhbGVk"),
        Delta(choice=0, text="b"),
    ]


def test_no_provider_of_the_published_types_is_told_anything_else() -> None:
    """`body_of` holds every body above to them; this one says that they would refuse."""
    provider: ProviderView = a_provider(extensions=True)
    conversation = message(messages=turns_with(think("x"), say("a")))
    with pytest.raises(ValueError, match="reasoning"):
        body_of(conversation, provider)


# As they are counted.


CUT = """data: {"choices":[{"delta":{"reasoning_content":"%s"}}]}

data: {"choices":[{"delta":{"content":"so"}}]}

"""


MESSAGE_CUT = """data: {"type":"message_start","message":{"content":[],\
"usage":{"input_tokens":34,"output_tokens":1}}}

data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking"}}

data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"%s"}}

"""


@pytest.mark.anyio
async def test_thoughts_of_a_message_that_is_cut_are_counted_by_estimate() -> None:
    world = ProviderWorld(provider_says(MESSAGE_CUT % ("a long time ago " * 9)))
    provider = a_provider("anthropic")
    usage = (await run(world.generation(chat(reasoning_effort="low"), provider))).generation.usage
    assert usage.prompt_tokens == 34
    assert 30 < usage.reasoning_tokens <= usage.output_tokens


@pytest.mark.anyio
@pytest.mark.parametrize("effort", ["none", "low"])
async def test_thoughts_are_counted_whoever_hears_of_them(effort: str) -> None:
    world = ProviderWorld(provider_says(CUT % ("a long time ago " * 9)))
    heard = await run(world.generation(chat(reasoning_effort=effort), a_provider()))
    told = [event for event in heard.events if isinstance(event, ThoughtDelta)]
    assert len(told) == (effort == "low")
    usage = heard.generation.usage
    assert 30 < usage.reasoning_tokens < usage.output_tokens
    assert heard.tokens == usage.output_tokens  # what was not told goes with what is
    (witness,) = heard.generation.witnesses(0)
    assert witness.usage.reasoning_tokens <= witness.usage.output_tokens
    (total,) = heard.generation.totals
    assert total.usage == usage
