"""The official SDKs read our bytes: what they gather is what was said. No sockets."""

from collections.abc import Callable

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code, Refusal
from core.protocol import Usage
from gateway import anthropic as anthropic_dialect
from gateway import openai as openai_dialect
from gateway.anthropic import AnthropicStream
from gateway.conversation import Delta, ModelCard
from gateway.openai import OpenAIChatStream, OpenAICompletionStream
from gateway.retry import retry_headers
from tests.support.dialect_events import (
    CREATED_MS,
    REQUEST_ID,
    Told,
    a_conversation,
    a_refusal,
    broken,
    finished_events,
    gathered,
    said,
    usages,
    whole,
    written,
)
from tests.support.sdk_clients import JSON, MODEL, anthropic_client, openai_client

Events = list[Told]
USAGE = Usage(prompt_tokens=9, cached_tokens=4, output_tokens=2)


def chat_stream(**changes: object) -> OpenAIChatStream:
    return OpenAIChatStream(a_conversation(**changes), request_id=REQUEST_ID, created_ms=CREATED_MS)


def text_stream(**changes: object) -> OpenAICompletionStream:
    conversation = a_conversation(kind="text", turns=(), prompt="Once", **changes)
    return OpenAICompletionStream(conversation, request_id=REQUEST_ID, created_ms=CREATED_MS)


def message_stream() -> AnthropicStream:
    return AnthropicStream(a_conversation(dialect="anthropic"), request_id=REQUEST_ID)


@given(data=st.data(), n=st.integers(1, 3), pings=st.booleans(), logprobs=st.booleans())
def test_the_openai_sdk_gathers_a_chat(
    data: st.DataObject, n: int, *, pings: bool, logprobs: bool
) -> None:
    events = data.draw(finished_events(n=n, logprobs=logprobs))
    raw = written(chat_stream(n=n, include_usage=True), whole(events, USAGE), pings=pings)
    texts = [""] * n
    finished = set()
    usage = None
    for chunk in openai_client(raw).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finished.add(choice.index)
    assert texts == [said(events, choice) for choice in range(n)]
    assert finished == set(range(n))
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 2, 11)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4


# At any other finish this accumulator raises an error of its own, whoever serves it.
@given(events=finished_events(n=2, logprobs=True, finishes=("stop",)))
def test_the_openai_sdk_s_accumulator_gathers_a_chat(events: Events) -> None:
    raw = written(chat_stream(n=2), whole(events, USAGE))
    with openai_client(raw).chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}]
    ) as stream:
        whole_answer = stream.get_final_completion()
    texts = [choice.message.content or "" for choice in whole_answer.choices]
    assert texts == [said(events, 0), said(events, 1)]
    for choice in whole_answer.choices:
        chances = [
            c
            for e in events
            if isinstance(e, Delta) and e.choice == choice.index
            for c in e.chances
        ]
        logprobs = choice.logprobs.content if choice.logprobs else None
        assert [bytes(t.bytes or []) for t in logprobs or []] == [c.token for c in chances]


@given(events=finished_events(n=2))
def test_the_openai_sdk_gathers_a_completion(events: Events) -> None:
    raw = written(text_stream(n=2), whole(events, USAGE))
    texts = ["", ""]
    for chunk in openai_client(raw).completions.create(model=MODEL, prompt="Once", stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [said(events, 0), said(events, 1)]


@given(events=finished_events(), usage=usages(), pings=st.booleans())
def test_the_anthropic_sdk_s_accumulator_gathers_a_message(
    events: Events, usage: Usage, *, pings: bool
) -> None:
    raw = written(message_stream(), whole(events, usage), pings=pings)
    with anthropic_client(raw).messages.stream(
        model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "Hello"}]
    ) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == said(events, 0)
    assert "".join(block.text for block in message.content if block.type == "text") == text
    assert message.usage.output_tokens == usage.output_tokens
    assert message.usage.cache_read_input_tokens == usage.cached_tokens
    assert message.usage.cache_creation_input_tokens == usage.cache_write_tokens
    assert message.usage.input_tokens == usage.fresh_tokens
    assert message.stop_reason is not None


@given(events=finished_events(), at=st.integers(0, 15))
def test_the_openai_sdk_raises_on_a_broken_stream(events: Events, at: int) -> None:
    raw = written(chat_stream(), broken(whole(events, USAGE), at))
    with pytest.raises(openai.APIError, match="No replica is free") as caught:
        list(
            openai_client(raw).chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hello"}], stream=True
            )
        )
    assert caught.value.code == "server_is_overloaded"


@given(events=finished_events(), at=st.integers(0, 15))
def test_the_anthropic_sdk_raises_on_a_broken_stream(events: Events, at: int) -> None:
    raw = written(message_stream(), broken(whole(events, USAGE), at))
    with (
        pytest.raises(anthropic.APIStatusError, match="No replica is free"),
        anthropic_client(raw).messages.stream(
            model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "Hello"}]
        ) as stream,
    ):
        stream.until_done()


@given(events=finished_events(n=2, logprobs=True))
def test_the_openai_sdk_reads_whole_answers(events: Events) -> None:
    conversation = a_conversation(n=2, logprobs=1)
    answer = gathered(conversation, events, USAGE)
    body = openai_dialect.chat_json(
        answer, conversation, request_id=REQUEST_ID, created_ms=CREATED_MS
    )
    chat = openai_client(body, JSON).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}]
    )
    assert [choice.message.content for choice in chat.choices] == [said(events, i) for i in (0, 1)]
    assert chat.usage is not None
    assert chat.usage.total_tokens == 11
    body = openai_dialect.completion_json(
        answer, conversation, request_id=REQUEST_ID, created_ms=CREATED_MS
    )
    completion = openai_client(body, JSON).completions.create(model=MODEL, prompt="Once")
    assert [choice.text for choice in completion.choices] == [said(events, i) for i in (0, 1)]


@given(events=finished_events())
def test_the_anthropic_sdk_reads_a_whole_answer(events: Events) -> None:
    conversation = a_conversation(dialect="anthropic")
    body = anthropic_dialect.message_json(
        gathered(conversation, events, USAGE), conversation, request_id=REQUEST_ID
    )
    message = anthropic_client(body, JSON).messages.create(
        model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "Hello"}]
    )
    text = said(events, 0)
    assert [block.text for block in message.content if block.type == "text"] == [text] * bool(text)
    assert message.usage.input_tokens == 5


def test_the_anthropic_sdk_reads_a_count() -> None:
    client = anthropic_client(anthropic_dialect.count_tokens_json(7), JSON)
    counted = client.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}]
    )
    assert counted.input_tokens == 7


CARD = ModelCard(id=MODEL, created_ms=CREATED_MS, context_tokens=8192, output_tokens_max=4096)


def test_both_sdks_read_lists_of_models() -> None:
    ours = openai_client(openai_dialect.models_json([CARD], {}), JSON).models.list().data
    assert [(model.id, model.created) for model in ours] == [(MODEL, 1_790_000_000)]
    theirs = anthropic_client(anthropic_dialect.models_json([CARD], {}), JSON).models.list()
    assert [(model.id, model.max_input_tokens) for model in theirs] == [(MODEL, 8192)]
    one = openai_client(openai_dialect.model_json(CARD), JSON).models.retrieve(MODEL)
    assert one.owned_by == "headworks"
    other = anthropic_client(anthropic_dialect.model_json(CARD), JSON).models.retrieve(MODEL)
    assert other.created_at.year == 2026


OPENAI_ERRORS: dict[Code, type[openai.APIStatusError]] = {
    Code.BAD_REQUEST: openai.BadRequestError,
    Code.CONTEXT_LENGTH: openai.BadRequestError,
    Code.INVALID_KEY: openai.AuthenticationError,
    Code.FORBIDDEN: openai.PermissionDeniedError,
    Code.MODEL_NOT_FOUND: openai.NotFoundError,
    Code.MODEL_NOT_PRICED: openai.PermissionDeniedError,
    Code.CONFLICT: openai.ConflictError,
    Code.UNPROCESSABLE: openai.UnprocessableEntityError,
    Code.RATE_LIMITED: openai.RateLimitError,
    Code.QUOTA: openai.RateLimitError,
    Code.OVERLOADED: openai.InternalServerError,
    Code.INTERNAL: openai.InternalServerError,
}


@pytest.mark.parametrize("code", OPENAI_ERRORS)
def test_the_openai_sdk_raises_its_own_error(code: Code) -> None:
    refusal = Refusal(code=code, message="No.", param="model")
    status, body = openai_dialect.error_body(refusal, REQUEST_ID)
    headers = JSON | {"x-request-id": REQUEST_ID} | retry_headers(refusal)
    with pytest.raises(OPENAI_ERRORS[code]) as caught:
        openai_client(body, headers, status).models.list()
    error = caught.value
    assert (error.code, error.param, error.request_id) == (code.value, "model", REQUEST_ID)


ANTHROPIC_ERRORS: dict[Code, type[anthropic.APIStatusError]] = {
    Code.BAD_REQUEST: anthropic.BadRequestError,
    Code.INVALID_KEY: anthropic.AuthenticationError,
    Code.FORBIDDEN: anthropic.PermissionDeniedError,
    Code.MODEL_NOT_FOUND: anthropic.NotFoundError,
    Code.MODEL_NOT_PRICED: anthropic.PermissionDeniedError,
    Code.RATE_LIMITED: anthropic.RateLimitError,
    Code.OVERLOADED: anthropic.InternalServerError,
    Code.INTERNAL: anthropic.InternalServerError,
}


@pytest.mark.parametrize("code", ANTHROPIC_ERRORS)
def test_the_anthropic_sdk_raises_its_own_error(code: Code) -> None:
    refusal = Refusal(code=code, message="No.")
    status, body = anthropic_dialect.error_body(refusal, REQUEST_ID)
    headers = JSON | {"request-id": REQUEST_ID} | retry_headers(refusal)
    with pytest.raises(ANTHROPIC_ERRORS[code]) as caught:
        anthropic_client(body, headers, status).models.list()
    assert caught.value.request_id == REQUEST_ID


@pytest.mark.parametrize(
    ("refusal", "tries"),
    [
        (a_refusal(code=Code.RATE_LIMITED, retry_after_ms=1), 3),
        (a_refusal(code=Code.OVERLOADED, retry_after_ms=1), 3),
        (a_refusal(code=Code.QUOTA), 1),
        (a_refusal(code=Code.CONFLICT), 1),
        (a_refusal(code=Code.BAD_REQUEST), 1),
    ],
)
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_both_sdks_retry_what_may_get_better_and_nothing_else(
    refusal: Refusal, tries: int, kind: str
) -> None:
    seen = []
    dialects: dict[str, Callable[[Refusal, str], tuple[int, bytes]]] = {
        "openai": openai_dialect.error_body,
        "anthropic": anthropic_dialect.error_body,
    }
    status, body = dialects[kind](refusal, REQUEST_ID)

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(status, headers=JSON | retry_headers(refusal), content=body)

    http_client = httpx2.Client(transport=httpx2.MockTransport(handler))
    client: openai.OpenAI | anthropic.Anthropic
    if kind == "openai":
        client = openai.OpenAI(api_key="k", base_url="http://gateway/v1", http_client=http_client)
    else:
        client = anthropic.Anthropic(
            api_key="k", base_url="http://gateway", http_client=http_client
        )
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)):
        client.models.list()
    assert len(seen) == tries
